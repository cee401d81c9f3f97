"""The portable GPU backend: plain Triton, any GPU that Triton knows.

Reading order: ``device`` (the helpers every kernel quotes), ``write``, ``attend`` (a program a tile of rows), ``split``
(keys of a sequence over several programs), ``invariant`` (bits that do not depend on the batch), ``merge``,
``metadata``; then the host: ``tuning`` (problem to plan), ``calls`` (plan to launches), ``launch``, ``backend``.
Importing this package imports no triton; the first call does.
"""

from __future__ import annotations

from pagetile.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
