"""The counter: the public ops. They validate, choose a backend and run it; see :mod:`pagetile.ops.dispatch`.

Importing this package registers ``torch.ops.pagetile.*`` (:mod:`pagetile.ops.library`).
"""

import pagetile.ops.library  # noqa: F401 (registers the operators)
from pagetile.ops.attention import flash_attn_varlen_func
from pagetile.ops.deferred import raise_deferred
from pagetile.ops.kvcache import flash_attn_with_kvcache
from pagetile.ops.merge import merge_attn_states
from pagetile.ops.write import reshape_and_cache_flash

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "raise_deferred",
    "reshape_and_cache_flash",
]
