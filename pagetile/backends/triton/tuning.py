"""Which kernels run, in what shapes, and why: pure functions from a problem and a few device facts to a plan.

A plan is a value: it can be printed, compared and passed. Thresholds carry their reason in the plan's ``reasons``;
the numbers come from an H200 (benchmarks/results), and shared memory bounds them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagetile.contracts.problem import AttendProblem, MergeProblem, WriteProblem

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_SHARED_OUT = 2048
"""Sequences whose lengths one program can look through; larger batches fill the device without a split."""
MAX_PARTIAL_BYTES = 1 << 30
"""Partial states above this are not worth their memory; the plan then runs without a split."""
CHUNK_KEYS = 1024
"""Keys between two restarts of the softmax state under ``batch_invariant``: every such result's bits hang on it."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What tuning needs to know of a device; by default an H200.

    Attributes:
        processors: multiprocessors.
        shared_bytes: shared memory that one program may use.
        capability: compute capability (of AMD devices, what torch reports in its place).
        fp8: the hardware converts fp8 (NVIDIA from 8.9 on); elsewhere integers do.
    """

    processors: int = 132
    shared_bytes: int = 232448
    capability: tuple[int, int] = (9, 0)
    fp8: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work.

    Attributes:
        rows: rows of the tile, ``tokens * heads`` of them used.
        heads, head_tiles: query heads of a group packed in a tile, and tiles a group needs.
        keys: keys a step. ``warps``, ``stages``: of the launch.
        d, dv: parts of the head sizes, ``(first, second)``, each a power of two; 0 is no second part.
        most_pages: a step of up to so many whole pages reads their ids as scalars, one step ahead; 0 never does.
    """

    rows: int
    tokens: int
    heads: int
    head_tiles: int
    keys: int
    warps: int
    stages: int
    d: tuple[int, int]
    dv: tuple[int, int]
    most_pages: int = 8

    def __str__(self) -> str:
        parts = "+".join(str(x) for x in self.d if x)
        return (
            f"{self.rows} rows ({self.tokens} tokens x {self.heads} heads) x {self.keys} keys, head {parts}, "
            f"{self.warps} warps, {self.stages} stages"
        )


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The unsplit kernel, for sequences of more than ``min_q`` queries; ``search``: one row of tiles for all."""

    tile: Tile
    search: bool
    min_q: int = 0


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split kernel, for sequences of 1 to ``max_q`` queries.

    Attributes:
        programs: items of each sequence if ``fixed``, else of the whole batch (up to one more a sequence).
        min_tiles: key tiles below which an item is not cut.
        combine: a second launch adds the states; False when no sequence can have more than one item.
    """

    tile: Tile
    max_q: int
    fixed: bool
    programs: int
    min_tiles: int
    combine: bool

    def items(self, num_seqs: int) -> int:
        """Work items the grid holds."""
        return num_seqs * self.programs if self.fixed else num_seqs + self.programs


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """The kernel of ``batch_invariant``; ``spread``: a program a chunk, added by a second launch (the same bits)."""

    tile: Tile
    chunk: int
    spread: bool
    max_chunks: int


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """What one attention launches, and the reasons; ``fp8``: the hardware converts what a quantised cache holds."""

    rows: RowsPlan | None = None
    split: SplitPlan | None = None
    invariant: InvariantPlan | None = None
    reasons: tuple[str, ...] = ()
    fp8: bool = True

    def __str__(self) -> str:
        lines = []
        if self.rows:
            lines.append(f"rows: {self.rows.tile}" + (f", q_len > {self.rows.min_q}" if self.rows.min_q else ""))
        if self.split:
            share = "items a sequence" if self.split.fixed else "items shared out by length"
            lines.append(f"split: {self.split.tile}, q_len <= {self.split.max_q}, {self.split.programs} {share}")
        if self.invariant:
            how = "a program a chunk" if self.invariant.spread else "chunks in one program"
            lines.append(f"invariant: {self.invariant.tile}, chunks of {self.invariant.chunk}, {how}")
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])


@dataclass(frozen=True, slots=True)
class WritePlan:
    """How a write is cut: ``span`` moves a token's heads as one run, else a head at a time; ``rows`` runs a program."""

    span: bool
    rows: int
    width: int
    warps: int
    reasons: tuple[str, ...] = ()
    fp8: bool = True

    def __str__(self) -> str:
        what = "tokens, all heads" if self.span else "heads"
        return "\n".join(
            [
                f"write: {self.rows} {what} a program, {self.width} elements wide, {self.warps} warps",
                *(f"- {reason}" for reason in self.reasons),
            ]
        )


def stored_bytes(problem: AttendProblem | WriteProblem) -> int:
    """Bytes of an element of the cache."""
    return ITEM_BYTES.get(problem.kind, 1)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def head_parts(size: int) -> tuple[int, int]:
    """A head size as one or two powers of two of at least 64; 80 is padded to 128, 576 = 512 + 64.

    Padding is masked, so it costs no memory traffic. Two parts where the next power of two would waste half of a
    large tile. No part is narrower than 64: in tiles of 64 rows in float16 and bfloat16, a second part of 32 and
    values of 16 gave wrong results on an H200 under Triton 3.6 (the cause is not known; the interpreter agrees with
    float64).
    """
    whole = max(64, power_of_two(size))
    if size <= 256 or whole == size:
        return whole, 0
    first = whole // 2
    second = max(64, power_of_two(size - first))
    return (first, second) if second < first else (whole, 0)


def plan_attend(problem: AttendProblem, device: DeviceFacts) -> AttendPlan:
    """The launches of one attention."""
    plan = _plan_attend(problem, device)
    if problem.kind.startswith("fp8"):
        return replace(plan, fp8=device.fp8, reasons=(*plan.reasons, _why_fp8(device)))
    return plan


def _why_fp8(device: DeviceFacts) -> str:
    return "fp8 is converted by the hardware" if device.fp8 else "fp8 is converted by integers: the hardware cannot"


def _plan_attend(problem: AttendProblem, device: DeviceFacts) -> AttendPlan:
    if problem.batch_invariant:
        return _plan_invariant(problem, device)
    group_heads = _group_heads(problem)
    reasons: list[str] = []
    if problem.num_splits > 1 or problem.max_q_len * group_heads <= 64:
        return _plan_split(problem, device, problem.max_q_len, reasons)

    tile = _wide_tile(problem, device)
    tiles = min(
        problem.num_seqs * -(-problem.max_q_len // tile.tokens), problem.num_tokens // tile.tokens + problem.num_seqs
    )
    programs = tiles * problem.num_kv_heads * tile.head_tiles
    if problem.num_splits == 0 and programs < device.processors and problem.max_k_len > 8 * tile.keys:
        reasons.append(
            f"{programs} tiles of {tile.rows} rows leave most of {device.processors} multiprocessors idle, "
            f"so up to {problem.max_k_len} keys are split"
        )
        return _plan_split(problem, device, problem.max_q_len, reasons, tile)

    search = problem.num_seqs > 1 and problem.num_seqs * -(-problem.max_q_len // tile.tokens) > 2 * tiles
    search = search or problem.num_seqs > 65535
    if problem.num_seqs == 1 or problem.num_tokens >= problem.num_seqs * problem.max_q_len or problem.num_splits == 1:
        reasons.append(f"{programs} tiles of {tile.rows} rows fill the device")
        return AttendPlan(rows=RowsPlan(tile, search), reasons=tuple(reasons))
    short_q = max(1, 16 // group_heads)
    reasons.append(
        f"{problem.num_tokens} rows in {problem.num_seqs} sequences of up to {problem.max_q_len}: some are shorter, "
        f"and those of {short_q} or fewer go to the split kernel"
    )
    short = _plan_split(problem, device, short_q, reasons)
    return replace(short, rows=RowsPlan(tile, search, short_q))


def _group_heads(problem: AttendProblem) -> int:
    """Query heads of a group that one tile packs: all of them, or an even share of a large group."""
    limit = 32 if problem.dtype == "float32" else 64
    return -(-problem.group // -(-problem.group // limit))


def _make_tile(
    problem: AttendProblem, device: DeviceFacts, rows: int, keys: int, warps: int, stages: int, max_q: int = 1 << 30
) -> Tile:
    """A tile whose pipeline fits in shared memory: fewer stages first, then fewer keys."""
    heads = _group_heads(problem)
    d, dv = head_parts(problem.head_size), head_parts(problem.head_size_v)
    size = ITEM_BYTES[problem.dtype]
    wide = stored_bytes(problem) * (sum(d) + sum(dv))
    query = rows * sum(d) * size
    # Where weights change layout between the two products they pass through shared memory; wgmma reads registers.
    direct = rows >= 64 and device.capability[0] >= 9 and problem.dtype != "float32"
    spare = 2048 if direct else rows * keys * 4 + 2048
    if stored_bytes(problem) < size and (direct or problem.dtype == "float32"):
        spare += keys * max(sum(d), sum(dv)) * size  # what bytes stand for goes back to shared memory for the product
    while keys > 16 and stages * keys * wide + query + spare > device.shared_bytes:
        if stages > 2:
            stages -= 1
        else:
            keys //= 2
    if stages * keys * wide + query + spare > device.shared_bytes:
        stages = 1
    if rows >= 64 and dv == (256, 0):
        dv = (128, 128)  # one accumulator of 256 leaves no registers for the exact treatment of NaN
    head_tiles = -(-problem.group // heads)
    tokens = max(1, min(rows // heads, max_q))
    return Tile(rows, tokens, heads, head_tiles, keys, warps, stages, d, dv)


def _wide_tile(problem: AttendProblem, device: DeviceFacts) -> Tile:
    """The tile of many query rows: tensor cores are the limit, so it is as large as registers allow."""
    wide = sum(head_parts(problem.head_size_v))
    if problem.dtype == "float32":
        return _make_tile(problem, device, 32, 32, 4, 1)
    if wide > 256:
        return _make_tile(problem, device, 64, 32, 8, 2)
    if wide > 128 and device.capability[0] < 9:
        # Four warps spill here, at 32 and at 64 keys; eight do not. Compiled, not timed.
        return _make_tile(problem, device, 64, 64, 8, 2)
    if wide > 128:
        # The compiler spills 164 bytes here. 64 rows do not spill, but read each key twice as often from the second
        # level cache: 399 TFLOP/s on an H200 stand against a tile that has not been timed.
        return _make_tile(problem, device, 128, 64, 8, 2)
    # 128 x 128 runs a long causal prefill 5 % faster than 64 x 64, and 1024 tokens 10 % slower; it needs wgmma. Heads
    # of 64 leave registers for two small programs a multiprocessor, which is 10 % faster at any length.
    # So do scales of tokens: with 128 x 128 they spill.
    if wide <= 64 or problem.max_k_len <= 2048 or device.capability[0] < 9 or problem.scale == "token_head":
        return _make_tile(problem, device, 64, 64, 4, 4 if wide <= 64 else 3)
    return _make_tile(problem, device, 128, 128, 8, 3)


def _narrow_tile(problem: AttendProblem, device: DeviceFacts, rows: int, max_q: int) -> Tile:
    """The tile of few query rows: memory is the limit, so loads in flight count and rows do not.

    Measured for 16 rows: steps of 8 KiB of K and of V by two warps keep most loads in flight; deeper pipelines take
    shared memory from other programs of the multiprocessor and are slower.
    """
    wide = sum(head_parts(problem.head_size_v))
    if problem.dtype == "float32":
        return _make_tile(problem, device, rows, 32 if wide <= 128 else 16, 4, 1, max_q)
    if wide > 256:
        return _make_tile(problem, device, rows, 32, 8, 2, max_q)
    if wide > 128:
        return _make_tile(problem, device, rows, 32, 4, 4, max_q)
    if rows > 16:
        return _make_tile(problem, device, rows, 64, 4, 3, max_q)
    if wide > 64 and stored_bytes(problem) == 1:
        # By the compiler's count, not yet by a clock: turning bytes into numbers takes two warps to 255 registers and
        # eight warps a multiprocessor; four warps have 144, and there are twelve.
        return _make_tile(problem, device, rows, 32, 4, 4, max_q)
    if wide > 64:
        return _make_tile(problem, device, rows, 32, 2, 4 if max_q > 1 or problem.block_size > 16 else 3, max_q)
    return _make_tile(problem, device, rows, 64, 2, 3, max_q)


def _plan_split(
    problem: AttendProblem, device: DeviceFacts, max_q: int, reasons: list[str], tile: Tile | None = None
) -> AttendPlan:
    """Short queries: keys are spread until every multiprocessor has a few programs."""
    heads = _group_heads(problem)
    if tile is None:
        rows = min(32 if problem.dtype == "float32" else 64, max(16, power_of_two(max_q * heads)))
        tile = _narrow_tile(problem, device, rows, max_q)
    query_tiles = -(-max_q // tile.tokens)
    slots = max(1, problem.num_kv_heads * tile.head_tiles * query_tiles * max(1, problem.num_seqs))
    min_tiles = 1 if problem.num_splits else max(1, 256 // tile.keys)
    most = max(1, -(-problem.max_k_len // (tile.keys * min_tiles)))
    if problem.num_splits:
        fixed, programs = True, problem.num_splits
        reasons.append(f"num_splits={problem.num_splits} was asked for")
    elif problem.num_seqs == 1 or problem.num_seqs > MAX_SHARED_OUT:
        fixed = True
        programs = min(most, max(1, round(4 * device.processors / slots)))
        reasons.append(f"{programs} items a sequence give {programs * slots} programs")
    else:
        fixed = False
        each = max(1, round(4 * device.processors / slots))
        programs = problem.num_seqs * min(most, each)
        reasons.append(
            f"{programs} to {programs + problem.num_seqs} items shared out by length give about "
            f"{programs * slots // problem.num_seqs} programs for {device.processors} multiprocessors"
        )
    plan = SplitPlan(tile, max_q, fixed, programs, min_tiles, most > 1 and programs > 1)
    if not plan.combine:  # nothing may be cut then, whatever the lengths on the device turn out to be
        plan = replace(plan, fixed=True, programs=1)
    if partial_bytes(problem, plan) > MAX_PARTIAL_BYTES:
        reasons.append(f"partial states of {partial_bytes(problem, plan) >> 20} MiB are too large: no split")
        plan = replace(plan, fixed=True, programs=1, combine=False)
    return AttendPlan(split=plan, reasons=tuple(reasons))


def partial_bytes(problem: AttendProblem, plan: SplitPlan | InvariantPlan) -> int:
    """Bytes of the partial states of a plan: an upper bound from host facts."""
    tile = plan.tile
    if isinstance(plan, SplitPlan):
        items = plan.items(problem.num_seqs) * -(-plan.max_q // tile.tokens)
    else:
        items = problem.num_seqs * -(-problem.max_q_len // tile.tokens) * plan.max_chunks
    return items * problem.num_kv_heads * tile.head_tiles * tile.rows * (problem.head_size_v + 2) * 4


def _plan_invariant(problem: AttendProblem, device: DeviceFacts) -> AttendPlan:
    """One tile shape whatever the batch; only where the chunks run depends on it."""
    single = replace(problem, num_seqs=1, num_tokens=1, max_q_len=1, max_k_len=1)
    wide = sum(head_parts(problem.head_size_v))
    rows = 32 if problem.dtype == "float32" else 64
    keys = 16 if problem.dtype == "float32" and wide > 128 else 32 if problem.dtype == "float32" or wide > 128 else 64
    tile = _make_tile(single, device, rows, keys, 4 if wide <= 128 else 8, 1 if problem.dtype == "float32" else 2)
    max_chunks = max(1, -(-problem.max_k_len // CHUNK_KEYS))
    plan = InvariantPlan(tile, CHUNK_KEYS, True, max_chunks)
    programs = problem.num_seqs * -(-problem.max_q_len // tile.tokens) * problem.num_kv_heads * tile.head_tiles
    size = partial_bytes(problem, plan)
    if max_chunks == 1 or programs >= 4 * device.processors or size > MAX_PARTIAL_BYTES // 4:
        why = f"{programs} tiles fill the device" if max_chunks > 1 else "every sequence fits in one chunk"
        if programs < 4 * device.processors and max_chunks > 1:
            why = f"partial states of {size >> 20} MiB are too large to spread the chunks"
        return AttendPlan(invariant=replace(plan, spread=False), reasons=(why, "the bits do not depend on this choice"))
    why = f"{programs} tiles do not fill {device.processors} multiprocessors, so chunks run side by side"
    return AttendPlan(invariant=plan, reasons=(why, "the bits do not depend on this choice"))


def plan_write(problem: WriteProblem, device: DeviceFacts = DeviceFacts()) -> WritePlan:
    """A token's heads as one span where they lie together and one scale serves all; a head at a time otherwise."""
    widest = max(problem.head_size, problem.head_size_v)
    size = ITEM_BYTES[problem.dtype]
    if problem.heads_contiguous and problem.scale in ("none", "tensor"):
        width = min(2048 // size, max(16, power_of_two(problem.num_kv_heads * widest)))
        why = "the heads of a token are one run of elements in source and cache, so a program moves whole tokens"
        span = True
    else:
        width = max(16, power_of_two(widest))
        why = "the heads of a token lie apart in source or cache, so a program moves single heads"
        if problem.heads_contiguous:
            why = "each head has a scale of its own, so a program moves single heads"
        span = False
    # 2 KiB each of K and V a program, two 16-byte loads of each a thread: many small programs hide the latency of the
    # slots better than few large ones at every size measured.
    rows = max(1, 2048 // (width * size))
    warps = max(1, min(4, rows * width * size // 1024))
    aligned = "16-byte accesses" if problem.aligned else "element accesses: a base or stride is not 16-byte aligned"
    if problem.kind.startswith("fp8"):
        return WritePlan(span, rows, width, warps, (why, aligned, _why_fp8(device)), device.fp8)
    return WritePlan(span, rows, width, warps, (why, aligned))


def plan_merge(problem: MergeProblem) -> tuple[int, int, int]:
    """``(rows, width, warps)`` of a merge: about 4 KiB of each state a program."""
    width = max(16, power_of_two(problem.head_size))
    rows = max(1, 2048 // width)
    return rows, width, 4
