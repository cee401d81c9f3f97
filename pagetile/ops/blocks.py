"""``copy_blocks`` and ``swap_blocks``: whole blocks, inside caches, from one to another, and between devices.

Every index is looked at on the host before a byte moves. Copies inside a cache mean what they would one after the
other; they run by dependency level (:mod:`pagetile.contracts.moves`), all layers, K and V of one level at once.

Source: vLLM's ops of these names; theirs let a chain race.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagetile.backends.protocol import Backend
from pagetile.backends.verbs import CopyCall, verb_of
from pagetile.contracts.errors import (
    ArgumentError,
    BlockTableError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from pagetile.contracts.geometry import blocks_held
from pagetile.contracts.moves import Pair, last_of_each, plan_moves
from pagetile.contracts.problem import CopyProblem
from pagetile.contracts.shapes import require_no_overlap, require_same_dtype, require_tensor
from pagetile.ops.checks import INDEX_DTYPES, bump_version, check_named, check_no_grad, check_validate, is_plain
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import shares_memory

Mapping = Tensor | Sequence[Sequence[int]]
"""(source, destination) pairs: int64 or int32 ``[pairs, 2]``, or a list of pairs."""


def copy_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_mapping: Mapping,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Copy blocks inside every cache, in place, as if one pair after the other.

    Args:
        key_caches, value_caches: a tensor for each layer, the first axis the block (``NB`` in all of them), any other
            axes and strides: ``[NB, BS, Hkv, D]`` or x-packed. All on one device; none shares memory with another.
        block_mapping: (source, destination) pairs, int64 or int32 ``[pairs, 2]`` or a list of pairs. It belongs on the
            host: a tensor on a device costs one synchronisation.
        backend: ``auto``, the name of one backend, or a backend object.
        validate: every index is always looked at, on the host; its own value is, too.

    The copies are ordered on the current stream. A cycle takes a block of spare memory a cache.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors or pairs that do not agree.
        BlockTableError: an index outside the caches. Nothing has been written.
        UnsupportedError: a cache requires grad, or a CUDA graph is being captured (a captured copy between a GPU and
            the host is right, given the mapping on the host).
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    named = [
        (f"{name}[{i}]", cache)
        for name, caches in (("key_caches", key_caches), ("value_caches", value_caches))
        for i, cache in enumerate(caches)
    ]
    check_validate(validate)
    plain = _admit(named, backend, block_mapping)
    if not plain:
        torch.ops.pagetile.copy_blocks(list(key_caches), list(value_caches), _as_tensor(block_mapping), backend)
        return
    run_copy(named, block_mapping, backend)


def swap_blocks(
    src: Tensor | Sequence[Tensor],
    dst: Tensor | Sequence[Tensor],
    block_mapping: Mapping,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Copy blocks of ``src`` to ``dst``, in place, as if one pair after the other.

    Args:
        src, dst: a cache each, or a list of them (layers); the first axis is the block, whose number may differ, and
            behind it both have one shape, any strides. On one device, or on two: a GPU and pinned host memory, two
            GPUs. ``dst`` may be ``src`` itself; otherwise they share no memory.
        block_mapping: (source, destination) pairs, as for :func:`copy_blocks`.
        backend: who copies on one device; between devices torch does.
        validate: as for :func:`copy_blocks`.

    Everything is ordered on the current stream. A copy to or from pinned host memory does not wait: the host may look
    at ``dst``, or change ``src``, once the stream has got there. Memory that is not pinned is right, and slower.

    Raises:
        As :func:`copy_blocks`.
    """
    check_validate(validate)
    sources, targets = _listed(src), _listed(dst)
    if len(sources) != len(targets):
        raise ArgumentError(f"src has {len(sources)} tensors, but dst has {len(targets)}; pass one for one")
    names = [(f"[{i}]" if not isinstance(src, Tensor) else "") for i in range(len(sources))]
    plain = _admit(
        [(f"src{n}", t) for n, t in zip(names, sources, strict=True)]
        + [(f"dst{n}", t) for n, t in zip(names, targets, strict=True)],
        backend,
        block_mapping,
    )
    if not plain:
        torch.ops.pagetile.swap_blocks(list(sources), list(targets), _as_tensor(block_mapping), backend)
        return
    run_swap(names, sources, targets, block_mapping, backend)


def run_copy(named: Sequence[tuple[str, Tensor]], block_mapping: Mapping, backend: str | Backend) -> None:
    """Check and copy inside caches on plain tensors."""
    if not named:
        host_pairs(block_mapping)
        return
    first_name, first = named[0]
    for name, cache in named:
        _require_blocks(name, cache, first_name, first)
        require_no_overlap(name, cache)
        if cache.shape[0] != first.shape[0]:
            raise ShapeError(
                f"{name}: axis 0 (NB) is {cache.shape[0]}, but {first_name} has NB = {first.shape[0]}; all caches of "
                "one mapping have one number of blocks"
            )
    _require_apart(named)
    pairs = host_pairs(block_mapping)
    check_pairs(pairs, first.shape[0], first.shape[0])
    moves = plan_moves(pairs, first.shape[0])
    if not moves.levels:
        return
    for caches in _alike([cache for _, cache in named]):
        spares = [_room(cache, moves.spares) for cache in caches] if moves.spares else []
        _run(caches, caches, spares, moves.levels, backend)


def run_swap(
    names: Sequence[str],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    block_mapping: Mapping,
    backend: str | Backend,
) -> None:
    """Check and copy from one cache to another on plain tensors."""
    inside, across = [], []
    for name, source, target in zip(names, sources, targets, strict=True):
        _require_alike(f"src{name}", source, f"dst{name}", target)
        require_no_overlap(f"dst{name}", target)
        if _same_view(source, target):
            inside.append((f"dst{name}", target))
        elif source.device == target.device and shares_memory(source, target):
            raise ArgumentError(
                f"src{name} and dst{name} share memory and are not the same tensor; pass the very same view for both, "
                f"or a dst{name} of its own"
            )
        else:
            across.append((source, target))
    pairs = host_pairs(block_mapping)
    for source, target in zip(sources, targets, strict=True):
        check_pairs(pairs, source.shape[0], target.shape[0])
    if inside and across:
        raise ArgumentError("some of src are the very tensors of dst, and some are not; swap the two kinds apart")
    if inside:
        run_copy(inside, block_mapping, backend)
        return
    kept = last_of_each(pairs)
    if not kept:
        return
    for group in _alike_pairs([(s, t) for s, t in across if s.device == t.device]):
        _run([s for s, _ in group], [t for _, t in group], [], (kept,), backend)
    for source, target in across:
        if source.device != target.device:
            _between_devices(source, target, kept)


def _run(
    sources: list[Tensor],
    caches: list[Tensor],
    spares: list[Tensor],
    levels: Sequence[Sequence[Pair]],
    backend: str | Backend,
) -> None:
    block = caches[0][0] if caches[0].shape[0] else caches[0]
    if not block.numel():
        return
    if block.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "copies of blocks cannot be captured in a CUDA graph: their list is on the host, and a replayed graph "
            "would read memory that has been given back; copy before or after the graph"
        )
    problem = CopyProblem(caches[0].device.type, len(caches), block.numel() * block.element_size())
    chosen = select(problem, backend)
    tables = [torch.tensor(level, dtype=torch.int64) for level in levels]
    verb_of(chosen, "copy_blocks", problem)(CopyCall(problem, sources, caches, spares, tables))
    if torch.is_grad_enabled():
        for cache in caches:
            bump_version(cache)


def _between_devices(source: Tensor, target: Tensor, pairs: Sequence[Pair]) -> None:
    """Copies of neighbouring blocks that stay neighbours are one copy."""
    ordered = sorted(pairs)
    begin = 0
    for i in range(1, len(ordered) + 1):
        n = i - begin
        s, d = ordered[begin]
        if i < len(ordered) and ordered[i] == (s + n, d + n):
            continue
        target[d : d + n].copy_(source[s : s + n], non_blocking=True)
        begin = i


def host_pairs(block_mapping: Mapping) -> list[Pair]:
    """The mapping as a list of pairs of ints.

    Raises:
        ShapeError, DTypeError, ArgumentError: not pairs of integers.
        UnsupportedError: it is on a device, and a CUDA graph is being captured.
    """
    if not isinstance(block_mapping, Tensor):
        return _listed_pairs(block_mapping)
    _check_mapping(block_mapping)
    if block_mapping.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "block_mapping is on a device, and reading it waits for that device, which cannot be done while a CUDA "
            "graph is captured; pass it on the host"
        )
    return [(int(source), int(destination)) for source, destination in block_mapping.tolist()]


def _listed_pairs(block_mapping: Any) -> list[Pair]:
    array = np.asarray(block_mapping)
    if array.size == 0:
        return []
    if array.ndim != 2 or array.shape[1] != 2:
        raise ShapeError(
            f"block_mapping has the shape {list(array.shape)}; pass (source, destination) pairs, [pairs, 2]"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"block_mapping holds {array.dtype}; block ids are integers")
    return [(int(source), int(destination)) for source, destination in array.tolist()]


def _check_mapping(block_mapping: Tensor) -> None:
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        raise ShapeError(
            f"block_mapping has the shape {list(block_mapping.shape)}; pass (source, destination) pairs, [pairs, 2]"
        )
    if block_mapping.dtype not in INDEX_DTYPES:
        raise DTypeError(f"block_mapping is {block_mapping.dtype}; pass int64 or int32")


def check_pairs(pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> None:
    """Every index names a block.

    Raises:
        BlockTableError: one does not. Nothing has been written.
    """
    for row, pair in enumerate(pairs):
        for side, (block, held) in enumerate(zip(pair, (num_sources, num_destinations), strict=True)):
            if not 0 <= block < held:
                raise BlockTableError(
                    f"block_mapping[{row}, {side}] is {block}, the {('source', 'destination')[side]} of a copy, but "
                    f"{blocks_held(held)}. Nothing was written"
                )


def _require_blocks(name: str, cache: Tensor, first_name: str, first: Tensor) -> None:
    if cache.dim() < 1:
        raise ShapeError(f"{name} has no axes; its first axis is the block")
    if cache.device != first.device:
        raise DeviceError(f"{name} is on {cache.device}, but {first_name} is on {first.device}; copy each device apart")


def _require_alike(source_name: str, source: Tensor, target_name: str, target: Tensor) -> None:
    for name, tensor in ((source_name, source), (target_name, target)):
        if tensor.dim() < 1:
            raise ShapeError(f"{name} has no axes; its first axis is the block")
    require_same_dtype(target_name, target, source_name, source.dtype)
    if source.shape[1:] != target.shape[1:]:
        raise ShapeError(
            f"a block of {target_name} is {list(target.shape[1:])}, but one of {source_name} is "
            f"{list(source.shape[1:])}; both must have one shape"
        )


def _require_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    seen: dict[int, str] = {}
    for name, cache in named:
        other = seen.setdefault(cache.data_ptr(), name) if cache.numel() else name
        if other != name:
            raise ArgumentError(f"{name} and {other} begin at one address; pass every cache once")


def _same_view(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _alike(caches: Sequence[Tensor]) -> list[list[Tensor]]:
    """Caches by shape, strides and dtype: what one launch can take."""
    groups: dict[Any, list[Tensor]] = {}
    for cache in caches:
        groups.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(cache)
    return list(groups.values())


def _alike_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for source, target in pairs:
        key = (source.stride(), target.stride(), target.shape[1:], target.dtype, target.device)
        groups.setdefault(key, []).append((source, target))
    return list(groups.values())


def _room(cache: Tensor, blocks: int) -> Tensor:
    """Memory for a few more blocks, with the strides of ``cache``."""
    inner = sum((n - 1) * s for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True)) + 1
    memory = torch.empty((blocks - 1) * cache.stride(0) + inner, dtype=cache.dtype, device=cache.device)
    return memory.as_strided((blocks, *cache.shape[1:]), cache.stride())


def _listed(caches: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [caches] if isinstance(caches, Tensor) else caches


def _as_tensor(block_mapping: Mapping) -> Tensor:
    if isinstance(block_mapping, Tensor):
        return block_mapping
    return torch.tensor(_listed_pairs(block_mapping), dtype=torch.int64).reshape(-1, 2)


def _admit(named: Sequence[tuple[str, Tensor]], backend: str | Backend, block_mapping: Mapping) -> bool:
    """Whether the call may skip the dispatcher."""
    for name, cache in named:
        require_tensor(name, cache)
    if torch.is_grad_enabled():
        check_no_grad(named)
    tensors = [cache for _, cache in named]
    if isinstance(block_mapping, Tensor):
        tensors.append(block_mapping)
    plain = not tensors or is_plain(*tensors)
    if not plain:
        check_named(backend)
    return plain
