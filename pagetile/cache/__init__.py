"""Rooms with memory: the cache's tensors, the pools of blocks, the prefixes they hold, and the sequences over them."""

from pagetile.cache.batch import Batch
from pagetile.cache.defragment import compaction, defragment
from pagetile.cache.figures import GroupUsage, MemoryFigures, TableStats
from pagetile.cache.groups import CacheGeometry, LayerGroup, group_layers
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.memory import available_bytes
from pagetile.cache.offload import HostBlocks, Transfer
from pagetile.cache.pool import BlockPool, PoolStats
from pagetile.cache.prefix import Hasher, Prefix, Salt, blake2b, chain
from pagetile.cache.reservation import BlockCopy
from pagetile.cache.scales import CacheScales, KVMaxima, maxima_of, rescale
from pagetile.cache.sequence import Sequence
from pagetile.cache.sequences import SequenceTable
from pagetile.cache.store import Loaded, load_prefixes, save_prefixes

__all__ = [
    "Batch",
    "BlockCopy",
    "BlockPool",
    "CacheGeometry",
    "CacheScales",
    "GroupUsage",
    "Hasher",
    "HostBlocks",
    "KVMaxima",
    "LayerGroup",
    "Loaded",
    "MemoryFigures",
    "PagedKVCache",
    "PoolStats",
    "Prefix",
    "Salt",
    "Sequence",
    "SequenceTable",
    "TableStats",
    "Transfer",
    "available_bytes",
    "blake2b",
    "chain",
    "compaction",
    "defragment",
    "group_layers",
    "load_prefixes",
    "maxima_of",
    "rescale",
    "save_prefixes",
]
