"""Compiled graphs of the public functions: the same bits, and not one copy of the cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, merge_attn_states, reshape_and_cache_flash

BLOCKS, SIZE = 12, 12 * 4 * 2 * 8
"""Elements of one cache: nothing else in these programs is as large, so a tensor of that many is a cache."""

COPIES = ("clone", "copy", "empty", "zeros", "scatter", "contiguous", "auto_functionalized")
"""What copies, or makes room for a copy; the last is torch's own wrapper, which clones when it runs."""


def packed(kind: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One buffer (or two) and the K and V caches in it."""
    if kind == "apart":
        both = torch.zeros(2, BLOCKS, 4, 2, 8)
        return both, (both[0].clone(), both[1].clone())
    if kind == "unbind":
        both = torch.zeros(BLOCKS, 2, 4, 2, 8)
        k, v = both.unbind(1)
        return both, (k, v)
    both = torch.zeros(BLOCKS, 2, 4, 16)
    k, v = both.transpose(1, 2).split(8, dim=-1)
    return both, (k, v)


KINDS = ["apart", "unbind", "split"]


class Recorder(TorchDispatchMode):
    """Operators that ran with a tensor, in or out, as large as a cache."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if any(t.numel() >= SIZE for t in tensors):
            self.names.append(func.name())
        return result

    def copies(self) -> list[str]:
        return [name for name in self.names if any(copy in name for copy in COPIES)]


class Watched:
    """A backend that runs the graph as AOTAutograd leaves it, and watches what runs."""

    def __init__(self, **options: Any) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.ran: list[Recorder] = []
        self.backend = aot_autograd(fw_compiler=self._compile, **options)

    def _compile(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            with Recorder() as recorder:
                result = graph(*args)
            self.ran.append(recorder)
            return result

        return make_boxed_func(run)

    def copies_in_graphs(self) -> list[str]:
        """Names of nodes that copy, whatever it is."""
        nodes = [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]
        return [name for name in nodes if any(copy in name for copy in COPIES)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def step(batch: Any) -> Callable[..., Any]:
    """Read the cache, write, attend, read it again: what came before the write must stay what it was."""

    def step(q: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, ...]:
        before, row = k_cache.sum(), k_cache[7]
        reshape_and_cache_flash(key, value, k_cache, v_cache, batch.slot_mapping)
        out, lse = flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            3,
            batch.cu_seqlens_q,
            12,
            seqused_k=batch.seqused_k,
            block_table=batch.block_table,
            causal=True,
            return_softmax_lse=True,
        )
        return out * 2, lse, before, k_cache.sum(), v_cache[7] + 1, row * 2

    return step


def run_twice(function: Callable[..., Any], batch: Any, kind: str) -> list[tuple[Tensor, ...]]:
    """Two steps over one cache, the second with other keys; the caches' bits are part of the result."""
    both, (k_cache, v_cache) = packed(kind)
    results = []
    for sign in (1.0, -1.0):
        out = function(batch.q, batch.key * sign, batch.value[..., :8] * sign, k_cache, v_cache)
        results.append((*out, k_cache.clone(), v_cache.clone(), both.clone()))
    return results


def assert_same(a: Any, b: Any) -> None:
    for first, second in zip(a, b, strict=True):
        for i, (x, y) in enumerate(zip(first, second, strict=True)):
            assert torch.equal(x, y), f"result {i} differs"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [True, False])
def test_aot_eager_has_no_copy_of_the_cache(batch: Any, step: Callable[..., Any], kind: str, keep: bool) -> None:
    """``keep``: whether input mutations may stay in the graph (as for ``aot_eager``) or come out as its results."""
    watched = Watched(keep_inference_input_mutations=keep)
    with torch.no_grad():
        expected = run_twice(step, batch, kind)
        got = run_twice(torch.compile(step, fullgraph=True, backend=watched.backend), batch, kind)
    assert_same(expected, got)
    assert watched.copies_in_graphs() == []
    assert [recorder.copies() for recorder in watched.ran] == [[], []]
    assert all("pagetile::write" in recorder.names for recorder in watched.ran)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_backend_by_its_name(batch: Any, step: Callable[..., Any], kind: str, mode: Callable[..., Any]) -> None:
    with mode():
        expected = run_twice(step, batch, kind)
        assert_same(expected, run_twice(torch.compile(step, fullgraph=True, backend="aot_eager"), batch, kind))


def write_first_slot(key: Tensor, cache: Tensor) -> None:
    cache[0, 0] = key


def test_the_probe_finds_a_copy(batch: Any) -> None:
    """The same program with a write of torch's own kind is full of copies: the tests above can fail."""
    watched = Watched(keep_inference_input_mutations=True)
    library = torch.library.Library("pagetile_probe", "DEF")
    library.define("write(Tensor key, Tensor(a!) cache) -> ()")
    library.impl("write", write_first_slot, "CPU")
    torch.library.register_fake("pagetile_probe::write", lambda *_: None, lib=library)
    cache = torch.zeros(BLOCKS, 4, 2, 8)

    def program(key: Tensor, cache: Tensor) -> Tensor:
        torch.ops.pagetile_probe.write(key, cache)
        return cache.sum()

    with torch.no_grad():
        torch.compile(program, fullgraph=True, backend=watched.backend)(batch.key[0], cache)
    assert "auto_functionalized_v2" in watched.copies_in_graphs()
    assert watched.ran[0].copies()


def test_a_cache_made_or_changed_in_the_graph(batch: Any) -> None:
    """The write lands in an intermediate, and in a cache that the graph has already changed; nothing is confused."""

    def program(key: Tensor, value: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        own = torch.zeros_like(cache)
        old = cache.clone()
        cache.mul_(2)
        doubled = cache + 0
        reshape_and_cache_flash(key, value, cache, own, batch.slot_mapping)
        cache[3].add_(1)
        return own, old, doubled, cache.sum(), cache[7].clone()

    start = torch.arange(SIZE, dtype=torch.float32).reshape(BLOCKS, 4, 2, 8)
    a, b = start.clone(), start.clone()
    with torch.no_grad():
        expected = program(batch.key, batch.value[..., :8], a)
        got = torch.compile(program, fullgraph=True, backend="aot_eager")(batch.key, batch.value[..., :8], b)
    assert_same([expected], [got])
    assert torch.equal(a, b)


def test_a_write_whose_cache_nobody_reads_is_not_dropped(batch: Any) -> None:
    def program(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        reshape_and_cache_flash(key, value, k_cache, v_cache, batch.slot_mapping)
        return key + 1

    k_cache, v_cache = torch.zeros(2, BLOCKS, 4, 2, 8).unbind(0)
    with torch.no_grad():
        torch.compile(program, fullgraph=True, backend="aot_eager")(batch.key, batch.value[..., :8], k_cache, v_cache)
    assert torch.equal(k_cache[7, 0], batch.key[0])
    assert torch.equal(v_cache[11, 3], batch.value[4, :, :8])


def test_writing_to_out_and_merging(batch: Any) -> None:
    def program(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        options = {"seqused_k": batch.seqused_k, "block_table": batch.block_table, "return_softmax_lse": True}
        a, a_lse = flash_attn_varlen_func(q, k_cache, v_cache, 3, batch.cu_seqlens_q, 12, out=out, **options)
        total, total_lse = torch.empty_like(a), torch.empty_like(a_lse)
        merge_attn_states(total, a, a_lse, a, a_lse, total_lse)
        return total, total_lse

    _, (k_cache, v_cache) = packed("unbind")
    k_cache.copy_(batch.key_cache)
    a, b = torch.zeros(2, 5, 4, 8).unbind(0)
    watched = Watched(keep_inference_input_mutations=True)
    with torch.no_grad():
        expected = program(batch.q, k_cache, v_cache, a)
        got = torch.compile(program, fullgraph=True, backend=watched.backend)(batch.q, k_cache, v_cache, b)
    assert_same([expected], [got])
    assert torch.equal(a, b)
    assert "auto_functionalized" not in str(watched.copies_in_graphs())


@pytest.mark.parametrize("paged", [True, False])
def test_with_kvcache(batch: Any, paged: bool) -> None:
    lens = torch.tensor([8, 3, 2], dtype=torch.int32)
    cos, sin = torch.rand(2, 16, 2).unbind(0)

    def program(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cos,
            sin,
            cache_seqlens=lens,
            block_table=batch.block_table if paged else None,
            causal=True,
            return_softmax_lse=True,
        )

    shape = (BLOCKS, 4, 2, 8) if paged else (3, 16, 2, 8)
    caches = [torch.zeros(shape) for _ in range(4)]
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 1, 2, 8), torch.randn(3, 1, 2, 8)
    watched = Watched(keep_inference_input_mutations=True)
    with torch.no_grad():
        expected = program(q, k, v, *caches[:2])
        got = torch.compile(program, fullgraph=True, backend=watched.backend)(q, k, v, *caches[2:])
    for x, y in zip((*expected, *caches[:2]), (*got, *caches[2:]), strict=True):
        torch.testing.assert_close(x, y)
    if paged:
        assert watched.ran[0].copies() == []


def test_shapes_that_change_do_not_compile_anew(batch: Any, step: Callable[..., Any]) -> None:
    watched = Watched(keep_inference_input_mutations=True)
    compiled = torch.compile(step, fullgraph=True, backend=watched.backend, dynamic=True)
    with torch.no_grad():
        for blocks in (12, 13, 20):
            a, b = torch.zeros(2, blocks, 4, 2, 8), torch.zeros(2, blocks, 4, 2, 8)
            expected = step(batch.q, batch.key, batch.value[..., :8], a[0], a[1])
            got = compiled(batch.q, batch.key, batch.value[..., :8], b[0], b[1])
            assert_same([expected], [got])
            assert torch.equal(a, b)
    assert len(watched.graphs) == 1
    assert watched.copies_in_graphs() == []


def test_a_graph_with_a_backward_is_right(batch: Any) -> None:
    """Something else in the graph is trained; the write stays, and the gradient is that of the values it saw."""

    def program(weight: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        reshape_and_cache_flash(key, value, k_cache, v_cache, batch.slot_mapping)
        return (v_cache * weight).sum()

    weight = torch.ones(8, requires_grad=True)
    k_cache, v_cache = torch.zeros(2, BLOCKS, 4, 2, 8).unbind(0)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    compiled(weight, batch.key, batch.value[..., :8], k_cache, v_cache).backward()
    assert torch.equal(k_cache[7, 0], batch.key[0])
    torch.testing.assert_close(weight.grad, v_cache.sum((0, 1, 2)))


def test_decompositions_keep_the_stock_treatment(batch: Any) -> None:
    """A decomposed ``copy`` is an alias of its source; reading it after the write must give the old values."""

    def program(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.empty_like(k_cache)
        kept.copy_(k_cache)
        reshape_and_cache_flash(key, value, k_cache, v_cache, batch.slot_mapping)
        return kept + 0, k_cache + 0

    k_cache, v_cache = torch.zeros(2, BLOCKS, 4, 2, 8).unbind(0)
    with torch.no_grad():
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager_decomp_partition")
        kept, new = compiled(batch.key, batch.value[..., :8], k_cache, v_cache)
    assert not kept.any()
    assert torch.equal(new, k_cache)
    assert torch.equal(k_cache[7, 0], batch.key[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_has_no_copy_of_the_cache(batch: Any, step: Callable[..., Any], kind: str) -> None:
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        expected = run_twice(step, batch, kind)
        compiled = torch.compile(step, fullgraph=True)
        got, code = run_and_get_code(run_twice, compiled, batch, kind)
    for first, second in zip(expected, got, strict=True):
        for x, y in zip(first, second, strict=True):
            torch.testing.assert_close(x, y)
    sizes = [
        f"({BLOCKS}, 4, 2, 8)",
        f"({BLOCKS}, 2, 4, 2, 8)",
        f"({BLOCKS}, 2, 4, 16)",
        f"({SIZE}, )",
        f"({2 * SIZE}, )",
    ]
    buffers = [line for line in code[0].splitlines() if "= empty_strided" in line and any(s in line for s in sizes)]
    assert buffers == []
    assert "pagetile.write.default" in code[0]


def test_export_keeps_the_write(batch: Any) -> None:
    class Program(torch.nn.Module):
        def forward(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            reshape_and_cache_flash(key, value, k_cache, v_cache, batch.slot_mapping)
            return k_cache.sum()

    k_cache, v_cache = torch.zeros(2, BLOCKS, 4, 2, 8).unbind(0)
    arguments = (batch.key, batch.value[..., :8], k_cache.clone(), v_cache.clone())
    exported = torch.export.export(Program(), arguments).run_decompositions({})
    total = exported.module()(batch.key, batch.value[..., :8], k_cache, v_cache)
    assert torch.equal(k_cache[7, 0], batch.key[0])
    torch.testing.assert_close(total, k_cache.sum())
