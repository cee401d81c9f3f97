"""Keep an operator that writes to its arguments in place inside a compiled graph, so that no cache is ever copied.

AOTAutograd makes a graph functional: it wraps an operator that mutates in ``auto_functionalized_v2``, which clones
every mutated tensor before the call and copies the result back after it. Inductor takes both away again
("reinplacing"); a backend that runs the graph as it stands (``aot_eager``, CUDA graphs, one's own) does not, and would
copy the whole cache twice for each token. For those, the graph gets a call of :func:`run_in_place_` instead::

    packed' = run_in_place_("write", (packed,), *arguments)[0]

What comes out is the tensor that came in. Whatever reads the cache later in the program reads ``packed'``, so that
order is in the data flow; whatever read it earlier stays earlier, since the function's name ends in an underscore
and it is registered as having a side effect: the two marks by which graph passes know a mutation. The graph input is
marked as mutated, with itself, so that nothing is left to copy back at the end.

The stock treatment stays where a graph is more than a list of calls to run: for Inductor and ``torch.export``, which
know it and undo it; with decompositions, which may turn an operator into an alias of its input; and in a graph with
a backward, which is cut in two by its outputs. So it does with a torch that lacks the parts this file leans on, which
are not public. It is right everywhere, only slower.

Source: the treatment of ``fsdp.copy_`` in torch/distributed/fsdp, and torch/_higher_order_ops/auto_functionalize.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("pagetile")


def run_in_place_(name: str, bases: tuple[Tensor, ...], *args: Any) -> tuple[Tensor, ...]:
    """Call ``torch.ops.pagetile.<name>``, which writes to memory of ``bases``; returns ``bases`` themselves."""
    _operator(name)(*args)
    return bases


def keep_in_place(names: Iterable[str]) -> None:
    """Let graphs hold these operators, which return nothing, as calls of :func:`run_in_place_`."""
    try:
        from torch._subclasses.functional_tensor import FunctionalTensorMode
        from torch.fx.node import has_side_effect

        has_side_effect(run_in_place_)
        for name in names:
            _operator(name).py_impl(FunctionalTensorMode)(_functional(name))
    except (ImportError, AttributeError) as error:
        log.info("compiled graphs hold copies of what an operator writes to, with this torch: %s", error)


def _functional(name: str) -> Any:
    """What ``FunctionalTensorMode`` does with an operator."""
    op = _operator(name)
    arguments = op._schema.arguments
    writes = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]

    def functional(mode: Any, *args: Any, **kwargs: Any) -> None:
        from torch._subclasses.functional_tensor import FunctionalTensor

        args = (*args, *(kwargs.get(a.name, a.default_value) for a in arguments[len(args) :]))
        written = [args[i] for i in writes if args[i] is not None]
        if _needs_stock() or not all(isinstance(tensor, FunctionalTensor) for tensor in written):
            mode.__torch_dispatch__(op, (FunctionalTensor,), args)
        else:
            _trace(mode, name, args, written)

    return functional


def _trace(mode: Any, name: str, args: tuple[Any, ...], written: list[Any]) -> None:
    """Put the call in the graph that is being traced, if one is, and mark what it writes to."""
    from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
    from torch.utils._pytree import tree_map

    functional = PythonFunctionalizeAPI(mode)
    bases = _bases(written)
    inner_bases = functional.unwrap_tensors(bases)
    inner_args = functional.unwrap_tensors(args)
    proxy_mode = get_proxy_mode()
    if proxy_mode is None:
        _operator(name)(*inner_args)
    else:
        with disable_proxy_modes_tracing():
            _operator(name)(*inner_args)
        tracer = proxy_mode.tracer
        proxies = tree_map(tracer.unwrap_proxy, (name, inner_bases, *inner_args))
        node = tracer.create_proxy("call_function", run_in_place_, proxies, {})
        # The same tensors under a new name: from here on the trace reads them from this node.
        track_tensor_tree(inner_bases, node, constant=None, tracer=tracer)
    for base, inner in zip(bases, inner_bases, strict=True):
        functional.replace(base, inner)  # written to, and still its own memory: views are taken anew
        functional.commit_update(base)
        functional.sync(base)


def _bases(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that own the memory, each once."""
    from torch._higher_order_ops.auto_functionalize import get_base

    bases = {}
    for tensor in tensors:
        base = get_base(tensor)
        base = tensor if base is None else base
        bases[base._cdata] = base
    return tuple(bases.values())


def _operator(name: str) -> Any:
    return getattr(torch.ops.pagetile, name).default


def _needs_stock() -> bool:
    """Whether this trace is for someone who takes the graph apart.

    If Inductor were not recognised, it would find no lowering for :func:`run_in_place_` and say so.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    virtualized = sys.modules.get("torch._inductor.virtualized")
    if torch.compiler.is_exporting() or (virtualized and isinstance(virtualized.V.fake_mode, FakeTensorMode)):
        return True
    mode = get_proxy_mode()
    if mode is None:
        return False
    decomposed = set(getattr(mode, "decomposition_table", None) or _decompositions_of_old())
    if decomposed - {torch.ops.aten.sym_numel.default}:
        return True
    return any(
        node.op == "placeholder" and node.name.startswith(("primals_", "tangents_")) for node in mode.tracer.graph.nodes
    )


def _decompositions_of_old() -> Any:
    """The table of a torch in which it was not yet an attribute of the tracing mode."""
    from torch.fx.experimental import proxy_tensor

    return getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", ())
