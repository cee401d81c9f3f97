"""The Hopper backend: attention over pages with the copy engine and warpgroup products, in Gluon, for sm_90.

Reading order: ``compat`` (Gluon's names), ``device`` (the questions both kernels ask), ``facts`` and ``notes`` (how
roles are told), ``loading`` (the roles that load); then ``tiles`` and ``prefill`` (long queries), ``stretch``,
``decode`` and ``states`` (short ones); then the host: ``tuning`` (problem to plan), ``maps``, ``scratch``, ``launch``,
``calls``, ``backend``. Importing this package imports no triton; the first call does.
"""

from __future__ import annotations

from pagetile.backends.hopper.backend import HopperBackend

__all__ = ["HopperBackend"]
