"""Where it was; it ships with ``pagetile bench`` now."""

from pagetile.cli.bench.cases import (
    DECODE,
    MIXED,
    PREFILL,
    SUITES,
    WRITE,
    AttendWork,
    WriteWork,
    attend_error,
    attend_inputs,
    lognormal_lengths,
    write_inputs,
)

__all__ = [
    "DECODE",
    "MIXED",
    "PREFILL",
    "SUITES",
    "WRITE",
    "AttendWork",
    "WriteWork",
    "attend_error",
    "attend_inputs",
    "lognormal_lengths",
    "write_inputs",
]
