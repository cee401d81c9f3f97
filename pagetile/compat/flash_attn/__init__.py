"""FlashAttention's functions over pagetile: CPU and GPU, any block size, nothing to build.

``from pagetile.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache`` gives the
surface of FlashAttention 2; :mod:`pagetile.compat.flash_attn.fa3` has that of FlashAttention 3. For code that says
``import flash_attn`` itself there is :func:`install`, which answers that name until :func:`uninstall`; nothing is
answered unless asked for.

Where the results differ from FlashAttention's, they follow pagetile's contract: a row that sees no key has the
log-sum-exp -inf (FlashAttention 2 writes +inf). There is no backward and no dropout; asking for either raises.

Source: flash_attn 2.8 (``flash_attn_interface.py``, ``bert_padding.py``) and its ``hopper/flash_attn_interface.py``,
whose arguments, positional orders and return conventions these are.
"""

from pagetile.compat.flash_attn.bert_padding import pad_input, unpad_input
from pagetile.compat.flash_attn.fa2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from pagetile.compat.flash_attn.hook import install, installed, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "installed",
    "pad_input",
    "uninstall",
    "unpad_input",
]
