"""Which kernels run, in what shapes, and why: pure functions from a problem and a few device facts to a plan.

A plan is a value: it can be printed, compared and passed. Thresholds carry their reason in the plan's ``reasons`` or
beside them here. Nothing in this file imports triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagetile.contracts.problem import AttendProblem

ITEM_BYTES = 2
TILE_ROWS = 64
"""Rows of one warpgroup's product: those of a decode tile, half those of a prefill tile."""
L2_BYTES = 32 << 20
"""Of the keys and values that the programs of a prefill walk at one time; an H200 has 50 MB, and more than this moves
through it."""
MIN_KEYS_A_PROGRAM = 256
"""Keys below which a program of decode is not worth its start and its state to merge."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What tuning needs to know of a device; by default an H200."""

    processors: int = 132
    shared_bytes: int = 232448


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill kernel: 128 packed rows by ``keys`` keys a step.

    Attributes:
        packed: rows of one token, the query heads of a KV head padded to a power of two.
        d, dv: head sizes as they lie in shared memory.
        stages, queries: tiles of K and of V in flight; of query rows.
        section: KV heads whose tiles are worked on together.
        turns: the two warpgroups take turns at the tensor cores.
        min_q: longest query of a sequence that is left to the decode kernel.
        programs: of the grid, at most.
        registers, worker_registers: of a thread that computes, and of one that loads.
    """

    packed: int
    d: int
    dv: int
    keys: int
    stages: int
    queries: int
    section: int
    turns: bool
    min_q: int
    programs: int
    registers: int
    worker_registers: int

    @property
    def tokens(self) -> int:
        """Tokens of one tile."""
        return 2 * TILE_ROWS // self.packed

    @property
    def shared_bytes(self) -> int:
        """Shared memory of its tiles; barriers and notes take less than 1 KiB more."""
        return ITEM_BYTES * (self.stages * self.keys * (self.d + self.dv) + self.queries * 2 * TILE_ROWS * self.d)

    def __str__(self) -> str:
        turns = ", warpgroups in turns" if self.turns else ""
        return (
            f"prefill: {self.tokens} tokens x {self.packed} heads by {self.keys} keys, head {self.d}/{self.dv}, "
            f"{self.stages} stages, {self.programs} programs, {self.section} KV heads at a time{turns}"
            + (f", q_len > {self.min_q}" if self.min_q else "")
        )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decode kernel: up to 64 packed rows by ``keys`` keys a step.

    Attributes:
        packed, d, dv, keys, stages, queries: as for prefill.
        max_q: longest query that it takes.
        held: rows of a partial state, a power of two.
        programs: of the grid. ``min_tiles``: tiles below which none is given less.
        registers, worker_registers: of a thread at launch, and of one that loads; two programs may share a
            multiprocessor.
    """

    packed: int
    d: int
    dv: int
    keys: int
    stages: int
    queries: int
    max_q: int
    held: int
    programs: int
    min_tiles: int
    registers: int
    worker_registers: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of its tiles; barriers and notes take less than 1 KiB more."""
        return ITEM_BYTES * (self.stages * self.keys * (self.d + self.dv) + self.queries * TILE_ROWS * self.d)

    @property
    def part(self) -> tuple[int, int]:
        """``(states, elements of a row)`` that a merge loads at once: up to 64 registers of 128 threads."""
        width = min(self.dv, 64 if self.held > 16 else 128)
        return max(1, min(16, 8192 // (self.held * width))), width

    @property
    def state_floats(self) -> int:
        """Floats of all partial states: two a program, sums and then peaks and totals."""
        return 2 * self.programs * self.held * (self.dv + 2)

    def __str__(self) -> str:
        return (
            f"decode: up to {self.max_q} tokens x {self.packed} heads by {self.keys} keys, head {self.d}/{self.dv}, "
            f"{self.stages} stages, {self.programs} programs of {self.min_tiles} tiles or more"
        )


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """What one attention launches, and the reasons. Both kernels: each takes the sequences of its query lengths.

    ``together``: of both, prefill starts while decode still runs; else when it has ended.
    """

    prefill: PrefillPlan | None = None
    decode: DecodePlan | None = None
    together: bool = True
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [str(part) for part in (self.decode, self.prefill) if part]
        return "\n".join([*parts, *(f"- {reason}" for reason in self.reasons)])


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def padded_size(size: int) -> int:
    """A head size as it lies in shared memory: 64, 128 or 256. The padding is zeros that nothing loads."""
    return max(64, power_of_two(size))


def box_keys(block_size: int, keys: int) -> int:
    """Keys of one copy: the most that lie in one block and in one tile, wherever it begins."""
    return math.gcd(block_size, keys)


def plan_attend(problem: AttendProblem, device: DeviceFacts) -> AttendPlan:
    """The launches of one attention."""
    packed = power_of_two(problem.group)
    short_q = TILE_ROWS // packed
    if problem.max_q_len <= short_q:
        reason = f"{problem.max_q_len} x {packed} rows fit in one tile of {TILE_ROWS}: decode"
        return AttendPlan(decode=_plan_decode(problem, device, problem.max_q_len, False), reasons=(reason,))
    if problem.num_seqs == 1 or problem.num_tokens >= problem.num_seqs * problem.max_q_len:
        reason = f"every sequence has up to {problem.max_q_len} x {packed} rows: prefill"
        return AttendPlan(prefill=_plan_prefill(problem, device, 0), reasons=(reason,))
    decode = _plan_decode(problem, device, short_q, True)
    reasons = (
        f"{problem.num_tokens} rows in {problem.num_seqs} sequences of up to {problem.max_q_len}: some are shorter, "
        f"and those of {short_q} or fewer go to decode",
        f"decode gets {decode.programs} of {device.processors} multiprocessors, prefill the others at the same time "
        "and all of them afterwards",
    )
    return AttendPlan(_plan_prefill(problem, device, short_q), decode, reasons=reasons)


def _sizes(problem: AttendProblem) -> tuple[int, int]:
    dv = padded_size(problem.head_size_v)
    return max(dv, padded_size(problem.head_size)), dv


def _plan_prefill(problem: AttendProblem, device: DeviceFacts, min_q: int) -> PrefillPlan:
    """Tensor cores are the limit: as many rows and keys as two warpgroups' registers hold, two stages or three."""
    d, dv = _sizes(problem)
    keys = 128 if d <= 128 else 64
    stages = 3 if d == 64 else 2
    queries = 2 if d <= 128 else 1
    a_head = max(1, problem.max_k_len) * (problem.head_size + problem.head_size_v) * ITEM_BYTES
    section = max(1, min(problem.num_kv_heads, L2_BYTES // a_head))
    packed = power_of_two(problem.group)
    registers, loaders = PREFILL_REGISTERS[d]
    return PrefillPlan(
        packed, d, dv, keys, stages, queries, section, False, min_q, device.processors, registers, loaders
    )


PREFILL_REGISTERS = {64: (224, 56), 128: (240, 24), 256: (240, 24)}
"""Of a thread of the two computing warpgroups and of the one that loads, by head size: 65536 in all."""


def _plan_decode(problem: AttendProblem, device: DeviceFacts, max_q: int, shared: bool) -> DecodePlan:
    """Memory is the limit: bytes in flight count. ``shared``: a prefill runs at the same time."""
    d, dv = _sizes(problem)
    packed = power_of_two(problem.group)
    held = power_of_two(max(1, max_q) * packed)
    if shared or d == 256 or problem.max_k_len * problem.num_seqs * problem.num_kv_heads <= SMALL_KEYS:
        keys, stages = (128, 3) if d <= 128 else (64, 3 if d + dv <= 384 else 2)
        programs, registers, loaders = device.processors, 168, 40
    else:
        keys, stages = 64 if d == 128 else 128, 3
        programs, registers, loaders = 2 * device.processors, 128, 40
    if shared:
        programs = _share_of_decode(problem, device)
    min_tiles = max(1, MIN_KEYS_A_PROGRAM // keys)
    # A second place for queries lets those of the next piece come early, where there is room for it.
    queries = 2 if programs <= device.processors and d <= 128 else 1
    return DecodePlan(packed, d, dv, keys, stages, queries, max_q, held, programs, min_tiles, registers, loaders)


SMALL_KEYS = 132 * 1024
"""Keys of all pairs up to which one program a multiprocessor is enough: with two, each has under 8 tiles of 64, and
what remains is starting them and adding twice as many states."""


def _share_of_decode(problem: AttendProblem, device: DeviceFacts) -> int:
    """Programs of a decode beside a prefill, such that both end together if all contexts are equally long.

    Per key: prefill does ``4 * Hq * D`` operations a token at 600 TFLOP/s, decode moves ``2 * Hkv * D`` elements a
    sequence at 4.2 TB/s. Lengths are on the device only; programs of prefill take over what decode leaves.
    """
    prefill = 4 * problem.num_q_heads * max(1, problem.num_tokens - problem.num_seqs) / 600e12
    decode = 2 * ITEM_BYTES * problem.num_kv_heads * problem.num_seqs / 4.2e12
    share = decode / (decode + prefill)
    return max(16, min(device.processors - 16, round(device.processors * share)))
