"""Hands: the backends that do the work. :mod:`~pagetile.backends.protocol` says what one is."""
