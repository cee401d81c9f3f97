"""PyTorch's variable-length attention over pagetile: ``torch.nn.attention.varlen.varlen_attn``, paged too.

PyTorch has a registry for attention kernels: a provider registers itself under a name and, when a user activates that
name, takes over ``aten::_flash_attention_forward`` and its in-place twin. Activating ``"pagetile"`` makes
``varlen_attn(..., block_table=...)`` work on CPUs, where PyTorch has no kernel of its own, and on GPUs without
FlashAttention 3; compiled graphs hold the operator and are served as well::

    from pagetile.integrations import torch_provider

    torch_provider.enable()      # register, then activate
    ...
    torch_provider.disable()     # give the operators back

On CUDA the operators serve ``scaled_dot_product_attention`` too. Calls that are no inference over ragged or paged keys
(dense batches, dropout, a debug mask) go on to the kernels that were there before. There is no backward: on CPUs it
raises when it is reached, on CUDA PyTorch's own FlashAttention 2 kernel does it from our output and log-sum-exp.

Source: ``torch/nn/attention/_registry.py``, ``varlen.py`` and ``_fa3.py`` of PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import pagetile.ops as ops
from pagetile.compat.flash_attn.shapes import blocks_of_one, rows, speaking
from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.ops.checks import host_bound

NAME = "pagetile"
"""What it is called in ``torch.nn.attention.list_flash_attention_impls()``."""

_FORWARD = "_flash_attention_forward"
_INPLACE = "_flash_attention_forward_no_dropout_inplace"
_BACKWARD = "_flash_attention_backward"

_WORDS = {
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "q": "query",
    "k": "key",
    "v": "value",
}
"""From the words of the ops to those of ``varlen_attn``."""


def register() -> None:
    """Make ``"pagetile"`` known to ``torch.nn.attention.activate_flash_attention_impl``. Changes no operator.

    Raises:
        UnsupportedError: this PyTorch has no registry of attention kernels.
    """
    _registry("register_flash_attention_impl")(NAME, register_fn=_take_over)


def enable() -> None:
    """Register and activate; whatever was active before is given back first.

    Raises:
        UnsupportedError: this PyTorch has no registry of attention kernels.
    """
    register()
    _registry("activate_flash_attention_impl")(NAME)


def disable() -> None:
    """Give the operators back, if pagetile has them."""
    if _registry("current_flash_attention_impl")() == NAME:
        _registry("restore_flash_attention_impl")()


def _registry(function: str) -> Any:
    import torch.nn.attention as home

    found = getattr(home, function, None)
    if found is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.nn.attention.{function}; its registry of attention kernels came "
            "with torch 2.11, call pagetile.flash_attn_varlen_func instead"
        )
    return found


class _Handle:
    """Keeps the registrations; the registry calls :meth:`remove` when the operators are given back."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library._destroy()


def _take_over() -> _Handle:
    """Put our kernels under the operators, for CPUs and, where this PyTorch is built for them, for CUDA devices."""
    cuda = torch.backends.cuda.is_built()
    if cuda and not hasattr(torch.library, "get_kernel"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.library.get_kernel, so dense attention on CUDA could not go on to "
            "the kernel it has now; take a newer torch, or call pagetile.flash_attn_varlen_func"
        )
    library = Library("aten", "IMPL")
    # The names as they are, not the overloads: other overloads (quantised queries) stay whose they are.
    names = [name for name in (_FORWARD, _INPLACE) if hasattr(torch.ops.aten, name)]
    for name in names:
        library.impl(name, _kernel(name), "CPU")
    library.impl(_BACKWARD, _no_backward, "CPU")
    if cuda:
        for name in names:
            before = torch.library.get_kernel(f"aten::{name}", "CUDA")
            library.impl(name, or_else(name, before), "CUDA", with_keyset=True)
    return _Handle(library)


def _kernel(name: str) -> Any:
    return _forward if name == _FORWARD else _inplace


def or_else(name: str, before: Any) -> Any:
    """Our kernel for the calls it is made for, and ``before`` (PyTorch's, with ``call_boxed``) for the others."""
    ours = _kernel(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        plain = args[1:] if name == _INPLACE else args
        query, _, _, cum_seq_q, _, _, _, dropout_p, _, return_debug_mask = plain[:10]
        if cum_seq_q is None or dropout_p or return_debug_mask or query.dtype not in _DTYPES:
            return before.call_boxed(keyset, *args, **kwargs)
        return ours(*args, **kwargs)

    return kernel


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``: out ``[T, Hq, Dv]``, float32 lse ``[Hq, T]``, and three that mean nothing."""
    _refuse_training(dropout_p, return_debug_mask)
    out, lse = _attend(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, None, **options)
    # A generator's state and offset, and the mask: only dropout and debugging give them a content.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return out, lse, state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: writes ``out``, returns the float32 lse ``[Hq, T]``."""
    _refuse_training(dropout_p, return_debug_mask)
    return _attend(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, out, **options)[1]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    out: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    if cum_seq_q is None:
        raise UnsupportedError(
            "cu_seq_q is None: dense batches are not taken on this device; pass packed rows and int32 [B + 1] offsets, "
            "or use scaled_dot_product_attention"
        )
    offsets = cum_seq_k
    if block_table is not None:
        block_table, offsets = rows("block_table", block_table), None
    else:
        key, value = rows("key", key), rows("value", value)
        if seqused_k is not None:  # room behind the keys of each sequence
            if cum_seq_k is None:
                raise ArgumentError("seqused_k is given without cu_seq_k; pass where the keys of each sequence start")
            key, value, block_table = blocks_of_one(key, value, cum_seq_k, host_bound("max_k", max_k))
            offsets = None
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    with speaking(**_WORDS):
        result = ops.flash_attn_varlen_func(
            rows("query", query),
            key,
            value,
            max_seqlen_q=max_q,
            cu_seqlens_q=cum_seq_q,
            max_seqlen_k=max_k,
            cu_seqlens_k=offsets,
            seqused_k=seqused_k,
            softmax_scale=scale,
            causal=is_causal,
            window_size=(left, right),
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            return_softmax_lse=True,
            out=out,
            # PyTorch's promise of num_splits=1 is that a sequence's bits do not depend on the batch.
            num_splits=0 if num_splits is None or num_splits == 1 else num_splits,
            batch_invariant=num_splits == 1,
        )
    assert isinstance(result, tuple)
    return result


def _refuse_training(dropout_p: float, return_debug_mask: bool) -> None:
    if dropout_p:
        raise UnsupportedError(f"dropout_p is {dropout_p}, but this is inference and nothing is dropped; pass 0.0")
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask is True, but probabilities are never stored; pass False")


def _no_backward(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise UnsupportedError(
        "pagetile has no backward for attention on CPUs; run varlen_attn under torch.no_grad(), or detach its inputs"
    )
