"""The counter: the public ops. They validate, choose a backend and run it; see :mod:`pagetile.ops.dispatch`.

Importing this package registers ``torch.ops.pagetile.*`` (:mod:`pagetile.ops.library`).
"""

import pagetile.ops.library_prefix
import pagetile.ops.library_quantised  # noqa: F401 (all three: they register the operators)
from pagetile.ops.attention import flash_attn_varlen_func
from pagetile.ops.convert import convert_fp8
from pagetile.ops.deferred import raise_deferred
from pagetile.ops.kvcache import flash_attn_with_kvcache
from pagetile.ops.merge import merge_attn_states
from pagetile.ops.shared_prefix import shared_prefix_attention
from pagetile.ops.write import reshape_and_cache_flash
from pagetile.ops.write_token_head import reshape_and_cache_flash_per_token_head

__all__ = [
    "convert_fp8",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "raise_deferred",
    "reshape_and_cache_flash",
    "reshape_and_cache_flash_per_token_head",
    "shared_prefix_attention",
]
