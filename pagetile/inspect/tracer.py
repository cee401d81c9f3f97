"""A backend that writes down what it is asked, and has another do the work.

What is recorded is the metadata of each call (slots, lengths, the rows of the block table that changed), not its
addresses: those are derived from the record when somebody asks (:mod:`pagetile.inspect.derive`). Nothing is hooked:
without a tracer the backend object is the undecorated one.

    tracer = Tracer()
    pagetile.reshape_and_cache_flash(..., backend=tracer)
    pagetile.flash_attn_varlen_func(..., backend=tracer)
    tracer.trace.steps[0].calls

A call over x-packed caches (``paged_attention_v1``) is noted without a store, so no address is derived from it.

On a GPU the metadata is copied on the device without a synchronisation and read when the trace is; a replayed CUDA
graph calls no Python, so a call under capture is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend, MergeCall, WriteCall
from pagetile.backends.verbs import CopyCall, FusedWriteCall, GatherCall, verb_of
from pagetile.contracts.errors import BackendError, UnsupportedError
from pagetile.contracts.geometry import CacheStrides
from pagetile.contracts.problem import Problem
from pagetile.inspect.record import Call, Store, Table, Timing, Trace
from pagetile.ops import dispatch

_MAX_CHOICES = 1024
_MAX_SNAPS = 64
_RESTART = 128
"""Steps after which a table is written down whole again, so that looking one up walks a short chain."""

Snapshot = Any
"""A numpy array (CPU) or a tensor on its device, until the trace is read."""


class Tracer:
    """Records each call's metadata and delegates.

    Args:
        backend: who does the work: a backend object, ``auto``, or a name; as the ops take it.
        layers: names of caches, ``data_ptr`` of a K cache -> ``(layer, group)``; see
            :func:`pagetile.inspect.tracer.layers_of`. Without, caches are numbered in order of appearance.

    A step begins with :meth:`begin_step`; where nobody calls it, with the second write to one cache. Not safe to use
    from several threads at once.
    """

    def __init__(self, backend: Backend | str = "auto", layers: Mapping[int, tuple[int, str]] | None = None) -> None:
        self.backend = backend
        self.name = f"traced {backend if isinstance(backend, str) else backend.name}"
        self.layers = dict(layers or {})
        self._trace = Trace()
        self._choices: dict[Problem, Backend] = {}
        self._stores: dict[tuple, int] = {}
        self._snaps: dict[int, tuple[Tensor, Snapshot]] = {}  # of this step's metadata tensors, by their identity
        self._calls: dict[tuple, int] = {}  # of this step, by what they share
        self._tables: dict[int, Table] = {}  # each store's last
        self._written: set[int] = set()  # stores that this step has written to
        self._explicit = False

    @property
    def trace(self) -> Trace:
        """What has been recorded. Reads back what still is on a device."""
        self._fold()
        return self._trace

    def begin_step(self) -> None:
        """The calls from here on belong to a new step."""
        self._explicit = True
        self._begin()

    def clear(self) -> None:
        """Forget everything recorded; caches keep their numbers."""
        self._trace = Trace(stores=self._trace.stores)
        self._forget_step()
        self._tables.clear()

    # The three verbs ------------------------------------------------------------------------------------------------

    def why_not(self, problem: Problem) -> list[str]:
        """The reasons of the backend that would do the work."""
        if not isinstance(self.backend, str):
            return self.backend.why_not(problem)
        try:
            self._choice(problem)
        except BackendError as error:
            return [f"{name}: {reason}" for name, why in error.reasons.items() for reason in why]
        return []

    def write(self, call: WriteCall) -> None:
        """Record the slots and delegate."""
        store = self._store_of_write(call)
        self._run_write(call, store, self._choice(call.problem).write, call)

    def _run_write(self, write: WriteCall, store: int, run: Callable[[Any], None], call: Any) -> None:
        slots, stride = self._snap(write.slot_mapping), write.slot_mapping.stride(0)
        began = time.perf_counter_ns()
        run(call)
        self._note(("write", id(slots), stride), store, began, slots=slots, slot_stride=stride)
        self._written.add(store)

    def attend(self, call: AttendCall) -> None:
        """Record the lengths and the block table and delegate."""
        paged = call.problem.layout == "paged" and call.block_table is not None
        store = self._store(call.k, call.v) if paged else -1
        loc = self._snap(call.query_start_loc)
        lens = self._snap(call.seq_lens) if call.seq_lens is not None else None
        starts = self._snap(call.key_starts) if call.key_starts is not None else None
        table = self._snap(call.block_table) if call.block_table is not None and paged else None
        stride = call.block_table.stride(0) if call.block_table is not None and paged else 0
        began = time.perf_counter_ns()
        self._choice(call.problem).attend(call)
        heads = call.problem.num_q_heads
        key = ("attend", id(loc), id(lens), id(table), id(starts), stride, call.window, heads)
        self._note(
            key,
            store,
            began,
            query_start_loc=loc,
            seq_lens=lens,
            table=table,
            key_starts=starts,
            window=call.window,
            num_q_heads=heads,
            table_stride=stride,
        )

    def merge(self, call: MergeCall) -> None:
        """Record that it happened and delegate."""
        began = time.perf_counter_ns()
        self._choice(call.problem).merge(call)
        self._note(("merge", call.problem.num_tokens, call.problem.num_heads), -1, began)

    # The verbs that some backends have -------------------------------------------------------------------------------

    def fused_write(self, call: FusedWriteCall) -> None:
        """Record the slots, as of a write, and delegate."""
        store = self._store_of_write(call.write)
        self._run_write(call.write, store, verb_of(self._choice(call.problem), "fused_write", call.problem), call)

    def gather(self, call: GatherCall) -> None:
        """Record the slots that are read and delegate."""
        store, slots, stride = (
            self._store(call.key_cache, call.value_cache),
            self._snap(call.slots),
            call.slots.stride(0),
        )
        run = verb_of(self._choice(call.problem), "gather", call.problem)
        began = time.perf_counter_ns()
        run(call)
        self._note(("gather", id(slots), stride), store, began, slots=slots, slot_stride=stride)

    def copy_blocks(self, call: CopyCall) -> None:
        """Record the pairs of blocks and delegate; caches are those that a write or an attention has named before."""
        run = verb_of(self._choice(call.problem), "copy_blocks", call.problem)
        bases = {cache.data_ptr() for cache in call.caches}
        inside = all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(call.sources, call.caches, strict=True))
        stores = [number for key, number in self._stores.items() if inside and bases & {key[0], key[1]}]
        pairs = torch.cat(call.levels).numpy().copy() if call.levels else np.zeros((0, 2), np.int64)
        began = time.perf_counter_ns()
        run(call)
        for store in stores or [-1]:
            self._note(("copy", len(call.levels), pairs.tobytes()), store, began, pairs=pairs)
            began = time.perf_counter_ns()  # one launch copies all; it is timed once

    def workspace_bytes(self, call: AttendCall) -> int:
        """What the backend that does the work says; 0 where it does not say."""
        needs = getattr(self._choice(call.problem), "workspace_bytes", None)
        return 0 if needs is None else needs(call)

    def check(self, call: WriteCall | AttendCall) -> None:
        """``validate=True`` away from the CPU, by the backend that does the work."""
        backend = self._choice(call.problem)
        check = getattr(backend, "check", None)
        if check is None:
            raise UnsupportedError(
                f"validate=True: the backend {backend.name} cannot check values on {call.problem.device}; "
                "pass validate=False, or trace a backend that can"
            )
        check(call)

    # Recording ------------------------------------------------------------------------------------------------------

    def _choice(self, problem: Problem) -> Backend:
        found = self._choices.get(problem)
        if found is None:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            found = self._choices[problem] = (
                dispatch.select(problem, self.backend) if isinstance(self.backend, str) else self.backend
            )
        return found

    def _begin(self) -> None:
        if all(store.device == "cpu" for store in self._trace.stores):
            self._fold()  # elsewhere it would wait for the device
        self._forget_step()
        self._trace.new_step()

    def _forget_step(self) -> None:
        self._snaps.clear()
        self._calls.clear()
        self._written.clear()

    def _note(self, key: tuple, store: int, began: int, **what: Any) -> None:
        ended = time.perf_counter_ns()
        step = self._trace.steps[-1] if self._trace.steps else self._trace.new_step()
        index = self._calls.get(key)
        if index is None:
            index = self._calls[key] = len(step.calls)
            step.calls.append(Call(op=key[0], **what))
        call = step.calls[index]
        if store >= 0 and store not in call.stores:
            call.stores.append(store)
        step.timings.append(Timing(index, store, began, ended))

    def _snap(self, tensor: Tensor) -> Snapshot:
        """A copy of a metadata tensor's values; the same object while they are the same in this step."""
        held = self._snaps.get(id(tensor))
        if tensor.device.type == "cpu":
            values = tensor.detach().numpy()
            if held is not None and held[0] is tensor and np.array_equal(values, held[1]):
                return held[1]
            copy: Snapshot = values.copy()
        else:
            if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "a tracer cannot record a call under CUDA graph capture: a replay would not reach it. "
                    "Trace the eager step, or capture without the tracer"
                )
            if held is not None and held[0] is tensor:
                return held[1]
            copy = tensor.detach().clone()
        if len(self._snaps) >= _MAX_SNAPS:
            self._snaps.clear()
        self._snaps[id(tensor)] = tensor, copy
        return copy

    def _store_of_write(self, call: WriteCall) -> int:
        """The store of a write's caches; the second write to one begins a step, unless the caller says when."""
        store = self._store(call.key_cache, call.value_cache) if call.problem.layout == "paged" else -1
        if not self._explicit and store >= 0 and store in self._written:
            self._begin()
        return store

    def _store(self, k: Tensor, v: Tensor) -> int:
        key = (k.data_ptr(), v.data_ptr(), k.shape, v.shape, k.stride(), v.stride())
        found = self._stores.get(key)
        if found is None:
            found = self._stores[key] = len(self._trace.stores)
            layer, group = self.layers.get(k.data_ptr(), (None, None))
            self._trace.stores.append(store_of(k, v, layer, group))
        return found

    def _fold(self) -> None:
        """Bring what was recorded since to the host, and tables to the rows that changed."""
        for step in self._trace.unfolded():
            folded: dict[int, Table] = {}
            for call in step.calls:
                call.slots, call.query_start_loc = _host(call.slots), _host(call.query_start_loc)
                call.seq_lens, call.key_starts = _host(call.seq_lens), _host(call.key_starts)
                if call.table is None or call.seq_lens is None or isinstance(call.table, Table):
                    continue
                raw = call.table
                if id(raw) not in folded:
                    before = self._tables.get(call.stores[0])
                    if before is not None and before.depth >= _RESTART:
                        before = None
                    size = self._trace.stores[call.stores[0]].block_size
                    folded[id(raw)] = Table.after(before, _host(raw), call.seq_lens, size)
                call.table = folded[id(raw)]
                for store in call.stores:
                    self._tables[store] = call.table


def _host(snapshot: Snapshot) -> Any:
    return snapshot.cpu().numpy() if isinstance(snapshot, Tensor) else snapshot


def store_of(k: Tensor, v: Tensor, layer: int | None = None, group: str | None = None) -> Store:
    """The sizes and strides of a K and V cache, ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``."""
    num_blocks, block_size, heads, size = k.shape
    return Store(
        layer=layer,
        group=group,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=size,
        head_size_v=v.shape[3],
        itemsize=k.element_size(),
        k_strides=CacheStrides(*k.stride()[:3]),
        v_strides=CacheStrides(*v.stride()[:3]),
        device=k.device.type,
    )


def layers_of(cache: Any) -> dict[int, tuple[int, str]]:
    """``layers=`` of a :class:`Tracer` over a :class:`pagetile.cache.PagedKVCache`: its layers by number and group."""
    return {cache.key(layer).data_ptr(): (layer, group.name) for group in cache.groups for layer in group.layers}
