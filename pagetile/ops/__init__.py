"""The counter: the public ops. They validate, choose a backend and run it; see :mod:`pagetile.ops.dispatch`.

Importing this package registers ``torch.ops.pagetile.*`` (:mod:`pagetile.ops.library`).
"""

import pagetile.ops.library_cache
import pagetile.ops.library_prefix
import pagetile.ops.library_quantised  # noqa: F401 (all of them: they register the operators)
from pagetile.ops.attention import flash_attn_varlen_func
from pagetile.ops.blocks import copy_blocks, swap_blocks
from pagetile.ops.convert import convert_fp8
from pagetile.ops.deferred import raise_deferred
from pagetile.ops.fused import rope_and_cache
from pagetile.ops.gather import gather_cache, scatter_cache
from pagetile.ops.kvcache import flash_attn_with_kvcache
from pagetile.ops.legacy import paged_attention_v1, paged_attention_v2
from pagetile.ops.legacy_cache import from_legacy, reshape_and_cache, to_legacy
from pagetile.ops.merge import merge_attn_states
from pagetile.ops.shared_prefix import shared_prefix_attention
from pagetile.ops.spans import profile_spans
from pagetile.ops.write import reshape_and_cache_flash
from pagetile.ops.write_token_head import reshape_and_cache_flash_per_token_head

__all__ = [
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
]
