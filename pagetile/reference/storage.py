"""Three layouts of one storage, all read token by token.

================  =========================  ====================  ==============================
layout            key                        value                 after :func:`by_token`
================  =========================  ====================  ==============================
``paged``         ``[NB, BS, Hkv, D]``       ``[NB, BS, Hkv, D]``  itself: NHD and HND are strides
``xpacked``       ``[NB, Hkv, D/x, BS, x]``  ``[NB, Hkv, D, BS]``  ``[NB, BS, Hkv, D/x, x]`` or ``[NB, BS, Hkv, D]``
``ragged``        ``[total, Hkv, D]``        ``[total, Hkv, D]``   not paged: sequences lie end to end
================  =========================  ====================  ==============================

Source: ``xpacked`` is the cache of vLLM's ``paged_attention_v1``, ``x = 16 / itemsize``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(cache: Tensor, layout: str) -> Tensor:
    """A view of a paged cache whose first two dimensions are block and offset; never a copy."""
    if layout != "xpacked":
        return cache
    return cache.permute(0, 3, 1, 2, 4) if cache.dim() == 5 else cache.permute(0, 3, 1, 2)


def gather(cache: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` tokens of a sequence, in order: ``[num_tokens, Hkv, D]``, a copy.

    Args:
        cache: by token, ``[NB, BS, ...]``; also scales ``[NB, BS, Hkv]``, which give ``[num_tokens, Hkv]``.
        blocks: the sequence's physical blocks in logical order, enough of them for ``num_tokens``.
    """
    tokens = cache[blocks.to(torch.int64)].flatten(0, 1)[:num_tokens]
    return tokens.flatten(2) if tokens.dim() > 3 else tokens  # the D/x and x of the x-packed key make one D
