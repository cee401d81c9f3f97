"""The test kit, shipped so that other kernels can be held to the same contract.

::

    from pagetile.testing import assert_attend, attend_cases, build_attend

    for case in attend_cases(backend, seed=0):
        built = build_attend(case)
        backend.attend(built.call)
        assert_attend(built)

* :mod:`~pagetile.testing.cases`, :mod:`~pagetile.testing.draw`: descriptions of calls, curated and drawn;
* :mod:`~pagetile.testing.build`, :mod:`~pagetile.testing.layouts`: a case into tensors of many storages;
* :mod:`~pagetile.testing.poison`: NaN where nothing may be read, canaries where nothing may be written;
* :mod:`~pagetile.testing.tolerance`: what is right, and how far from it is allowed;
* :mod:`~pagetile.testing.fixtures`: the same question asked in another way.
"""

from pagetile.testing.build import BuiltAttend, BuiltMerge, BuiltWrite, build_attend, build_merge, build_write
from pagetile.testing.cases import AttendCase, MergeCase, WriteCase
from pagetile.testing.draw import attend_cases, merge_cases, takes, write_cases
from pagetile.testing.poison import bits, first_difference, same_bits
from pagetile.testing.tolerance import assert_attend, assert_merge, truth

__all__ = [
    "AttendCase",
    "BuiltAttend",
    "BuiltMerge",
    "BuiltWrite",
    "MergeCase",
    "WriteCase",
    "assert_attend",
    "assert_merge",
    "attend_cases",
    "bits",
    "build_attend",
    "build_merge",
    "build_write",
    "first_difference",
    "merge_cases",
    "same_bits",
    "takes",
    "truth",
    "write_cases",
]
