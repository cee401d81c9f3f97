"""The truth: write, attend and merge in plain torch, as short as they can be said.

Read in this order: :mod:`~pagetile.reference.write`, :mod:`~pagetile.reference.attend`,
:mod:`~pagetile.reference.merge`. Every other backend is a faster way of saying the same three sentences and is
tested against these. Nothing here imports anything but torch and :mod:`pagetile.contracts`.
"""

from pagetile.reference.attend import attend
from pagetile.reference.merge import merge
from pagetile.reference.quantise import dequantise, quantise, token_head_scale
from pagetile.reference.write import write

__all__ = ["attend", "dequantise", "merge", "quantise", "token_head_scale", "write"]
