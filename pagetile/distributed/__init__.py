"""Attention over several ranks: keys split by token, by KV head, or both, over ``torch.distributed`` groups.

A state over some of the keys is ``(out, lse)``, and states add. So ranks that hold different tokens of a sequence each
attend to what they have, exchange states, and add them with the merge that everything here uses; ranks that hold
different KV heads need no exchange at all. Everything works on any number of ranks, with gloo on CPUs and NCCL on GPUs.

==========================  ========================================================================================
:class:`TokenSplit`         which rank holds a position, and where: local lengths, local slots
:class:`HeadSplit`          which query and KV heads are a rank's
:class:`RankGrid`           both at once: ``tp`` ways by head times ``cp`` ways by token; makes the groups
:class:`ContextParallel`    the step: slots to write, attention over the shard, exchange and merge
:class:`PeerError`          a rank that died or stalls, within a time limit
:mod:`~.model`              bytes moved and time a step on paper, from two ranks to thousands
==========================  ========================================================================================
"""

from pagetile.distributed.context import ContextParallel
from pagetile.distributed.errors import PeerError
from pagetile.distributed.heads import HeadSplit, RankGrid
from pagetile.distributed.local import LocalBatch, build_local_batch
from pagetile.distributed.tokens import TokenSplit

__all__ = [
    "ContextParallel",
    "HeadSplit",
    "LocalBatch",
    "PeerError",
    "RankGrid",
    "TokenSplit",
    "build_local_batch",
]
