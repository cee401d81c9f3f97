"""A paged KV cache and paged attention for PyTorch: one contract on CPU and GPU, in pure Python.

The public names are loaded when first used, so that ``import pagetile`` costs next to nothing and imports neither
torch nor numba, triton or transformers. ``import pagetile.ops`` registers ``torch.ops.pagetile.*``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagetile.cache import BlockPool, PagedKVCache, SequenceTable
    from pagetile.contracts.errors import (
        ArgumentError,
        BackendError,
        BlockTableError,
        DeviceError,
        DTypeError,
        OutOfBlocksError,
        PagetileError,
        ShapeError,
        SlotError,
        UnsupportedError,
    )
    from pagetile.contracts.metadata import AttentionMetadata, build_metadata
    from pagetile.contracts.state import State
    from pagetile.contracts.visibility import window_from_sliding
    from pagetile.engine import LLM, Engine, SamplingParams
    from pagetile.ops import (
        convert_fp8,
        copy_blocks,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
        from_legacy,
        gather_cache,
        merge_attn_states,
        paged_attention_v1,
        paged_attention_v2,
        profile_spans,
        raise_deferred,
        reshape_and_cache,
        reshape_and_cache_flash,
        reshape_and_cache_flash_per_token_head,
        rope_and_cache,
        scatter_cache,
        shared_prefix_attention,
        swap_blocks,
        to_legacy,
    )

__version__ = "0.1.0"

_HOMES = {
    "pagetile.cache": ("BlockPool", "PagedKVCache", "SequenceTable"),
    "pagetile.contracts.errors": (
        "ArgumentError",
        "BackendError",
        "BlockTableError",
        "DTypeError",
        "DeviceError",
        "OutOfBlocksError",
        "PagetileError",
        "ShapeError",
        "SlotError",
        "UnsupportedError",
    ),
    "pagetile.contracts.metadata": ("AttentionMetadata", "build_metadata"),
    "pagetile.contracts.state": ("State",),
    "pagetile.contracts.visibility": ("window_from_sliding",),
    "pagetile.engine": ("LLM", "Engine", "SamplingParams"),
    "pagetile.ops": (
        "convert_fp8",
        "copy_blocks",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
        "from_legacy",
        "gather_cache",
        "merge_attn_states",
        "paged_attention_v1",
        "paged_attention_v2",
        "profile_spans",
        "raise_deferred",
        "reshape_and_cache",
        "reshape_and_cache_flash",
        "reshape_and_cache_flash_per_token_head",
        "rope_and_cache",
        "scatter_cache",
        "shared_prefix_attention",
        "swap_blocks",
        "to_legacy",
    ),
}
"""Module -> the public names that live there."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "ArgumentError",
    "AttentionMetadata",
    "BackendError",
    "BlockPool",
    "BlockTableError",
    "DTypeError",
    "DeviceError",
    "Engine",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagetileError",
    "SamplingParams",
    "SequenceTable",
    "ShapeError",
    "SlotError",
    "State",
    "UnsupportedError",
    "build_metadata",
    "convert_fp8",
    "copy_blocks",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "from_legacy",
    "gather_cache",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "profile_spans",
    "raise_deferred",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_flash_per_token_head",
    "rope_and_cache",
    "scatter_cache",
    "shared_prefix_attention",
    "swap_blocks",
    "to_legacy",
    "window_from_sliding",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'pagetile' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
