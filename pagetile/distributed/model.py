"""Bytes moved and time of one attention over split keys, on paper.

A decode step over a layer is, on each rank, one read of its share of the cache and one exchange. Reading shrinks with
the number of ranks, the exchange does not; where they meet is where more ranks stop helping one request::

    read      B * L/cp * Hkv/tp * (D + Dv) * bytes      at the memory's rate, or the latency of a launch
    exchange  sent_bytes or received_bytes, whichever is more, at the link's rate, plus its latency for each
              collective, plus a little for each rank that is heard from

The bytes are exact and tests hold them to what the collectives are given; the times are no better than the rates that
go in (:class:`Machine`). ``docs/integrations/distributed.md`` has tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagetile.contracts.errors import ArgumentError
from pagetile.distributed.heads import RankGrid, shares
from pagetile.distributed.states import MODES, message_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """One decode step over one layer: a query token of each of ``num_seqs`` sequences of ``length`` tokens."""

    num_seqs: int
    length: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    itemsize: int = 2
    cache_itemsize: int = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of the hardware; GB/s are 1e9 bytes a second, times are microseconds.

    Attributes:
        memory_GBps: at which attention reads the cache.
        launch_us: of a step's kernels, however little there is to read.
        ranks_per_host: that are linked by ``link_*``; others by ``net_*``.
        link_GBps, net_GBps: that one rank sends at.
        link_us, net_us: of one collective of few bytes.
        peer_us: for each rank on another host that a rank hears from.
    """

    memory_GBps: float
    launch_us: float
    ranks_per_host: int
    link_GBps: float
    link_us: float
    net_GBps: float
    net_us: float
    peer_us: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step costs on the busiest rank: bytes read from the cache, sent and received, and microseconds."""

    read_bytes: int
    sent_bytes: int
    received_bytes: int
    read_us: float
    exchange_us: float

    @property
    def total_us(self) -> float:
        """Reading, then exchanging: nothing overlaps."""
        return self.read_us + self.exchange_us


def sent_bytes(num_tokens: int, num_heads: int, head_size_v: int, itemsize: int, size: int, mode: str) -> int:
    """Bytes that the busiest rank of ``size`` sends to the others to add its states with theirs.

    Args:
        num_tokens: rows; num_heads: query heads of the group; itemsize: of the output's elements.
        mode: ``all_to_all``: each other rank's heads, log-sum-exps and outputs. ``all_gather``: all of its state to
            each other. ``reduce_scatter``: its log-sum-exps to each other, and each other's float32 heads.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    parts = [len(part) for part in shares(num_heads, size)]
    if mode == "all_to_all":
        pieces = [message_bytes(num_tokens, heads, head_size_v, itemsize) for heads in parts]
        return sum(pieces) - min(pieces)  # nothing goes to itself
    if mode == "all_gather":
        return (size - 1) * message_bytes(num_tokens, num_heads, head_size_v, itemsize)
    return (size - 1) * (num_tokens * num_heads * 4 + num_tokens * max(parts) * head_size_v * 4)


def received_bytes(num_tokens: int, num_heads: int, head_size_v: int, itemsize: int, size: int, mode: str) -> int:
    """Bytes that the busiest rank receives; more than it sends (:func:`sent_bytes`) where some ranks get no heads."""
    if mode != "all_to_all":
        return sent_bytes(num_tokens, num_heads, head_size_v, itemsize, size, mode)
    widest = max(map(len, shares(num_heads, size)))
    return (size - 1) * message_bytes(num_tokens, widest, head_size_v, itemsize)


def estimate(work: Work, grid: RankGrid, machine: Machine, mode: str = "all_to_all") -> Estimate:
    """A step's cost on ``grid.tp * grid.cp`` ranks."""
    kv_heads = -(-work.num_kv_heads // grid.tp)
    q_heads = kv_heads * (work.num_q_heads // work.num_kv_heads)
    tokens = -(-work.length // grid.cp)
    read = work.num_seqs * tokens * kv_heads * (work.head_size + work.head_size_v) * work.cache_itemsize
    read_us = machine.launch_us + read / machine.memory_GBps / 1e3
    if grid.cp == 1:
        return Estimate(read, 0, 0, read_us, 0.0)
    state = (work.num_seqs, q_heads, work.head_size_v, work.itemsize, grid.cp, mode)
    sent, received = sent_bytes(*state), received_bytes(*state)
    near = min(grid.cp, machine.ranks_per_host) - 1
    far = grid.cp - 1 - near
    collectives = 2 if mode == "reduce_scatter" else 1
    latency = collectives * (machine.net_us if far else machine.link_us)
    rates = near / machine.link_GBps + far / machine.net_GBps
    wire = max(sent, received) / (grid.cp - 1) * rates / 1e3
    return Estimate(read, sent, received, read_us, latency + wire + far * machine.peer_us)
