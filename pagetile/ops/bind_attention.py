"""Hold the tensors of an attention to each other, and say what is asked. Reads no values.

The messages speak of the arguments of the public function that was called; :data:`VARLEN` has the names of
``flash_attn_varlen_func``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.dtypes import dtype_name
from pagetile.contracts.errors import ArgumentError, ShapeError
from pagetile.contracts.problem import AttendProblem, Granularity
from pagetile.contracts.shapes import (
    Sizes,
    require_contiguous_last,
    require_device,
    require_dtype,
    require_no_overlap,
    require_same_dtype,
    require_tensor,
)
from pagetile.ops.checks import INDEX_DTYPES, finest, scale_granularity
from pagetile.ops.scales import split_scale
from pagetile.ops.write import aligned_strides, bind_kind
from pagetile.ops.xpacked import Layout, bind_caches


@dataclass(frozen=True, slots=True)
class Names:
    """What the caller calls the tensors and bounds.

    Attributes:
        caller: the public function, by which an operator of a graph finds these names again.
    """

    caller: str = "flash_attn_varlen_func"
    q: str = "q"
    k: str = "k"
    v: str = "v"
    query_start_loc: str = "cu_seqlens_q"
    seq_lens: str = "seqused_k"
    key_start_loc: str = "cu_seqlens_k"
    key_starts: str = "key_starts"
    block_table: str = "block_table"
    max_q_len: str = "max_seqlen_q"
    max_k_len: str = "max_seqlen_k"

    def words(self) -> dict[str, str]:
        """From what backends call a tensor or bound in their messages to what the caller does."""
        return {word: getattr(self, word) for word in _BACKEND_WORDS if getattr(self, word) != word}


_BACKEND_WORDS = (
    "query_start_loc",
    "seq_lens",
    "key_start_loc",
    "key_starts",
    "block_table",
    "max_q_len",
    "max_k_len",
)

VARLEN = Names()
KVCACHE = Names(
    "flash_attn_with_kvcache", k="k_cache", v="v_cache", seq_lens="cache_seqlens", key_starts="cache_leftpad"
)
KVCACHE_ROWS = replace(KVCACHE, caller="flash_attn_with_kvcache, a row a sequence", block_table="cache_batch_idx")
SUFFIX = Names("shared_prefix_attention", k="k_cache", v="v_cache")
PREFIX = replace(
    SUFFIX,
    caller="shared_prefix_attention, the prefix",
    seq_lens="prefix_len",
    block_table="prefix_table",
    max_k_len="the room of prefix_table",
)
DECODE = Names(
    "paged_attention",
    q="query",
    k="key_cache",
    v="value_cache",
    seq_lens="seq_lens",
    block_table="block_tables",
    max_k_len="max_seq_len",
)
NAMES = {names.caller: names for names in (VARLEN, KVCACHE, KVCACHE_ROWS, SUFFIX, PREFIX, DECODE)}

FEWEST_KEYS = 16
MOST_SPLITS = 1024


def useful_splits(asked: int, max_k_len: int) -> int:
    """``num_splits`` without the splits that could not have work: no tile of a backend has fewer than
    :data:`FEWEST_KEYS` keys, and no machine has use for more than :data:`MOST_SPLITS` pieces of one sequence."""
    if asked <= 1 or type(max_k_len) is not int:
        return asked
    return max(1, min(asked, -(-max_k_len // FEWEST_KEYS), MOST_SPLITS))


@dataclass(slots=True, eq=False)
class AttendArgs:
    """Everything an attention op takes, in the order of its schema.

    Tensors as in :class:`pagetile.backends.protocol.AttendCall`; ``out`` and ``lse`` are None while they are not
    allocated yet.
    """

    out: Tensor | None
    lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor | None
    key_start_loc: Tensor | None
    block_table: Tensor | None
    max_q_len: int
    max_k_len: int
    scale: float
    window: tuple[int, int]
    softcap: float = 0.0
    key_starts: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    kv_cache_dtype: str = "auto"
    num_splits: int = 0
    batch_invariant: bool = False
    workspace: Tensor | None = None
    backend: str | Backend = "auto"
    validate: bool | str = False
    with_lse: bool = False
    caller: str = "flash_attn_varlen_func"

    @property
    def names(self) -> Names:
        """What the caller calls them."""
        return NAMES.get(self.caller, VARLEN)

    def plain_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that decide whether a call is a plain one."""
        return self.q, self.k, self.v, self.query_start_loc, self.seq_lens, self.block_table

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors that are there (scales apart), with the names that the caller knows them by."""
        names = self.names
        required = [
            (names.q, self.q),
            (names.k, self.k),
            (names.v, self.v),
            (names.query_start_loc, self.query_start_loc),
        ]
        optional = (
            (names.seq_lens, self.seq_lens),
            (names.key_start_loc, self.key_start_loc),
            (names.key_starts, self.key_starts),
            (names.block_table, self.block_table),
            ("alibi_slopes", self.alibi_slopes),
            ("s_aux", self.sinks),
            ("workspace", self.workspace),
            ("out", self.out),
            ("lse", self.lse),
        )
        return required + [(name, tensor) for name, tensor in optional if tensor is not None]


def bind_attend(args: AttendArgs, aligned: bool) -> AttendProblem:
    """The problem that the tensors of an attention pose, after holding them to each other.

    ``aligned``: whether the base addresses of k and v are multiples of 16 bytes.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: see :func:`pagetile.flash_attn_varlen_func`.
    """
    q, k, v, names = args.q, args.k, args.v, args.names
    for name, tensor in args.tensors():
        require_device(name, require_tensor(name, tensor), names.q, q.device)
    sizes = Sizes()
    sizes.bind(names.q, q, "T Hq D")
    kind = bind_kind(names.q, q, names.v, q, names.k, k, names.v, v, args.kv_cache_dtype)
    layout = "ragged"
    if args.block_table is not None:
        layout = _bind_paged(args, names, sizes)
    else:
        _bind_ragged(args, names, sizes)
    num_heads, num_kv_heads = sizes["Hq"], sizes["Hkv"]
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(
            f"{names.q}: axis 1 (Hq) is {num_heads}, but {names.k} has Hkv = {num_kv_heads}, which must divide it; "
            "each KV head serves the same number of query heads"
        )
    sizes.bind(names.query_start_loc, args.query_start_loc, "B+1")
    _bind_offsets(names.query_start_loc, args.query_start_loc)
    if args.query_start_loc.shape[0] != sizes["B"] + 1:
        raise ShapeError(
            f"{names.query_start_loc}: axis 0 (B + 1) is {args.query_start_loc.shape[0]}, but "
            f"{names.seq_lens if args.block_table is not None else names.key_start_loc} has B = {sizes['B']}; "
            "pass the start of every sequence and the end of the last"
        )
    for name, tensor in ((names.q, q), (names.k, k), (names.v, v)):
        require_contiguous_last(name, tensor)
    _bind_extras(args, names, sizes)
    covers: list[Granularity] = [
        scale_granularity(
            name,
            scale,
            kind=kind,
            num_kv_heads=num_kv_heads,
            device_of=names.q,
            device=q.device,
            num_seqs=sizes["B"],
            cache_shape=(sizes["NB"], sizes["BS"]) if args.block_table is not None else None,
        )
        for name, scale in (("k_descale", args.k_scale), ("v_descale", args.v_scale))
    ]
    _bind_outputs(args, names, sizes)
    num_tokens, max_q_len = sizes["T"], args.max_q_len
    if type(max_q_len) is int and type(num_tokens) is int:
        max_q_len = min(max_q_len, num_tokens)  # a launch is laid out by it, and may be asked for with any bound
    return AttendProblem(
        device=q.device.type,
        dtype=dtype_name(q.dtype),
        kind=kind,
        layout=layout,
        num_seqs=sizes["B"],
        num_tokens=num_tokens,
        max_q_len=max_q_len,
        max_k_len=args.max_k_len,
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=sizes["D"],
        head_size_v=sizes["Dv"],
        block_size=sizes["BS"] if args.block_table is not None else 0,
        window=args.window,
        softcap=args.softcap > 0,
        alibi=args.alibi_slopes is not None,
        sinks=args.sinks is not None,
        lse=args.with_lse,
        key_starts=args.key_starts is not None,
        num_splits=useful_splits(args.num_splits, args.max_k_len),
        batch_invariant=args.batch_invariant,
        scale=finest(covers[0], covers[1]),
        aligned=aligned and aligned_strides(k) and aligned_strides(v),
    )


def _bind_paged(args: AttendArgs, names: Names, sizes: Sizes) -> Layout:
    table, lens = args.block_table, args.seq_lens
    assert table is not None
    assert lens is not None
    layout = bind_caches(sizes, names.k, args.k, names.v, args.v)
    sizes.bind(names.seq_lens, lens, "B")
    _bind_offsets(names.seq_lens, lens)
    sizes.bind(names.block_table, table, "B width")
    require_dtype(names.block_table, table, INDEX_DTYPES)
    require_contiguous_last(names.block_table, table)
    return layout


def _bind_ragged(args: AttendArgs, names: Names, sizes: Sizes) -> None:
    starts = args.key_start_loc
    assert starts is not None
    sizes.bind(names.k, args.k, "keys Hkv D")
    sizes.bind(names.v, args.v, "keys Hkv Dv")
    sizes.bind(names.key_start_loc, starts, "B+1")
    _bind_offsets(names.key_start_loc, starts)
    if starts.shape[0] < 1:
        raise ShapeError(f"{names.key_start_loc}: axis 0 (B + 1) is 0, but it holds at least the 0 it starts with")
    sizes.fix("B", starts.shape[0] - 1, names.key_start_loc)


def _bind_offsets(name: str, tensor: Tensor) -> None:
    """int32 and contiguous: converting either would be a hidden kernel on every step."""
    require_dtype(name, tensor, (torch.int32,))
    require_contiguous_last(name, tensor)


def _bind_extras(args: AttendArgs, names: Names, sizes: Sizes) -> None:
    if args.key_starts is not None:
        sizes.bind(names.key_starts, args.key_starts, "B")
        _bind_offsets(names.key_starts, args.key_starts)
    if args.sinks is not None:
        sizes.bind("s_aux", args.sinks, "Hq")
        require_dtype("s_aux", args.sinks, (torch.float32,))
    slopes = args.alibi_slopes
    if slopes is not None:
        sizes.bind("alibi_slopes", slopes, "B Hq" if slopes.dim() == 2 else "Hq")
        require_dtype("alibi_slopes", slopes, (torch.float32,))


def _bind_outputs(args: AttendArgs, names: Names, sizes: Sizes) -> None:
    if args.out is not None:
        sizes.bind("out", args.out, "T Hq Dv")
        require_same_dtype("out", args.out, names.q, args.q.dtype)
        require_no_overlap("out", args.out)
    if args.lse is not None:
        sizes.bind("lse", args.lse, "Hq T")
        require_dtype("lse", args.lse, (torch.float32,))
        require_no_overlap("lse", args.lse)


def window_for(window: tuple[int, int]) -> tuple[int, int]:
    """Hold a normalised window that comes through a schema to its values.

    Raises:
        ArgumentError: a negative value other than -1.
    """
    if min(window) < -1:
        raise ArgumentError(f"window is {window}; use -1 for unbounded, or a distance of 0 or more")
    return window


def op_arguments(args: AttendArgs) -> tuple[Any, ...]:
    """What the operators take after ``out`` and ``lse``, in the order of their schema."""
    k_tensor, k_float = split_scale(args.k_scale)
    v_tensor, v_float = split_scale(args.v_scale)
    return (
        args.q,
        args.k,
        args.v,
        args.query_start_loc,
        args.seq_lens,
        args.key_start_loc,
        args.block_table,
        args.max_q_len,
        args.max_k_len,
        args.scale,
        *args.window,
        args.softcap,
        args.key_starts,
        args.alibi_slopes,
        args.sinks,
        k_tensor,
        v_tensor,
        k_float,
        v_float,
        args.kv_cache_dtype,
        args.num_splits,
        args.batch_invariant,
        args.backend,
        str(args.validate),
        args.caller,
    )


def with_outputs(args: AttendArgs, out: Tensor, lse: Tensor | None, workspace: Tensor | None) -> AttendArgs:
    """``args`` writing to ``out``, ``lse`` and ``workspace``."""
    return replace(args, out=out, lse=lse, workspace=workspace, with_lse=lse is not None)
