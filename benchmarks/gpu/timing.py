"""Where it was; it ships with ``pagetile bench`` now."""

from pagetile.cli.bench.timing import (
    Call,
    device_us,
    host_us,
    machine_rates,
)

__all__ = ["Call", "device_us", "host_us", "machine_rates"]
