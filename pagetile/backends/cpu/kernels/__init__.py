"""The compiled part of the CPU backend: explicit vectors, addresses, and the loops around them.

Everything here imports numba and is imported only when a kernel is first needed.
"""
