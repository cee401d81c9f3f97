"""A prefix cache that survives a restart: the blocks with a known prefix, in one safetensors file.

What is saved is every block that a later prompt could hit, live or cached: its keys and values, and who it is (salt,
token ids, chained digest). The file's metadata carry a manifest with the geometry, dtype and layout; a file for
another cache is refused, with the reason. Its last 32 bytes are a BLAKE2b of all bytes before them, so that a damaged
file is refused too. A file is written beside its name and renamed when it is whole: whoever dies on the way leaves the
previous file as it was.

Source: the safetensors format (metadata, tensors in order of alignment and name); the chained block hashes of
:mod:`pagetile.cache.prefix`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagetile.cache.kv import PagedKVCache, raw_elements
from pagetile.cache.prefix import Prefix
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError, CacheFileError

FORMAT = "pagetile prefix cache 1"
SEAL = "~seal"
"""Name of the last tensor, the digest: after all others in the order of the format, which sorts by size, then name."""
SEAL_BYTES = 32


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load_prefixes` did, in blocks over all groups.

    Attributes:
        loaded: read into the cache.
        known: in the file, but in the cache already.
        skipped: in the file, but there was no free block for them.
    """

    loaded: int
    known: int
    skipped: int


def save_prefixes(table: SequenceTable, cache: PagedKVCache, path: str | os.PathLike, *, identity: str = "") -> int:
    """Write every block with a known prefix to a file. The previous file is replaced when the new one is whole.

    To be called between steps. Needs memory on the host for what is saved.

    Args:
        table, cache: as in :meth:`SequenceTable.for_cache`.
        path: of the file, by custom ``*.safetensors``.
        identity: what else the keys and values depend on, as the weights; :func:`load_prefixes` must name the same.

    Returns:
        Blocks that were saved, over all groups.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    path = Path(path)
    nodes = _Nodes()
    tensors: dict[str, Tensor] = {}
    groups: dict[str, list[int]] = {}
    for name, pool in table.pools.items():
        # Two blocks may hold one prefix, computed at once by two requests; one is enough.
        unique = {nodes.number(prefix): b for b in pool.registered_blocks() if (prefix := pool.prefix(b)) is not None}
        groups[name] = list(unique)
        if unique:
            index = torch.tensor(list(unique.values()), dtype=torch.int64, device=cache.device)
            for part, tensor in cache.block_tensors(name).items():
                tensors[f"{name}/{part}"] = raw_elements(tensor).index_select(0, index).cpu().contiguous()
    tensors[SEAL] = torch.zeros(SEAL_BYTES, dtype=torch.uint8)
    manifest = _description(cache, identity) | {"nodes": nodes.rows, "blocks": groups}
    metadata = {"format": FORMAT, "manifest": json.dumps(manifest, separators=(",", ":"))}
    _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        _safetensors().save_file(tensors, partial, metadata=metadata)
        _seal(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return sum(map(len, groups.values()))


def load_prefixes(table: SequenceTable, cache: PagedKVCache, path: str | os.PathLike, *, identity: str = "") -> Loaded:
    """Read a file of :func:`save_prefixes` into free blocks; later prompts hit them.

    Nothing that is in the cache gives way: heads come first, and what finds no free block is left out. On any error
    nothing has changed.

    Raises:
        CacheFileError: the file is damaged, is no such file, or was made for another geometry, dtype, layout or
            identity; the message says which.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not table.prefix_cache:
        raise ArgumentError("the table has no prefix cache (prefix_cache=False); a file cannot be loaded into it")
    _check_seal(path)
    with _opened(path) as file:
        manifest = _manifest(path, file.metadata())
        _check_same(path, manifest, _description(cache, identity))
        prefixes = _prefixes(path, manifest, table)
        return _fill(table, cache, file, {name: [prefixes[i] for i in row] for name, row in manifest["blocks"].items()})


def _fill(table: SequenceTable, cache: PagedKVCache, file: Any, saved: dict[str, list[Prefix]]) -> Loaded:
    """Give prefixes that are not known yet free blocks, and read their content."""
    taken: dict[str, list[int]] = {}
    wanted: dict[str, list[int]] = {}
    known = skipped = 0
    try:
        for name, pool in table.pools.items():
            rows = saved.get(name, [])
            new = [at for at, prefix in enumerate(rows) if pool.lookup(prefix) is None]
            known += len(rows) - len(new)
            heads = sorted(new, key=lambda at: rows[at].num_blocks)[: pool.num_free]
            skipped += len(new) - len(heads)
            wanted[name] = sorted(heads)
            taken[name] = pool.allocate(len(heads))
            _read(cache, file, name, wanted[name], taken[name])
    except BaseException:
        for name, blocks in taken.items():
            table.pools[name].free(blocks)
        raise
    for name, pool in table.pools.items():
        for at, block in zip(wanted[name], taken[name], strict=True):
            pool.register(block, saved[name][at])
        pool.free(taken[name][::-1])  # the last of a list is evicted first, as the first of the file
    return Loaded(sum(map(len, taken.values())), known, skipped)


def _read(cache: PagedKVCache, file: Any, name: str, rows: list[int], blocks: list[int]) -> None:
    if not rows:
        return
    targets = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    for part, tensor in cache.block_tensors(name).items():
        raw = raw_elements(tensor)
        raw.index_copy_(0, targets, file.get_tensor(f"{name}/{part}")[rows].to(cache.device))


class _Nodes:
    """Prefixes as rows that name their parent by number; a parent stands before its children."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str]] = []  # parent or -1, content, digest; both in hexadecimal
        self._numbers: dict[int, int] = {}
        self._kept: list[Prefix] = []  # an id is only unique while its object lives

    def number(self, prefix: Prefix) -> int:
        """The row of a prefix, added with its parents if need be."""
        missing: list[Prefix] = []
        node: Prefix | None = prefix
        while node is not None and id(node) not in self._numbers:
            missing.append(node)
            node = node.parent
        for node in reversed(missing):
            parent = -1 if node.parent is None else self._numbers[id(node.parent)]
            self._numbers[id(node)] = len(self.rows)
            self.rows.append((parent, node.content.hex(), node.digest.hex()))
            self._kept.append(node)
        return self._numbers[id(prefix)]


def _prefixes(path: Path, manifest: dict, table: SequenceTable) -> list[Prefix]:
    """The prefixes of a manifest; their digests are computed again and must be those of the file."""
    found: list[Prefix] = []
    for at, (parent, content, digest) in enumerate(manifest["nodes"]):
        raw = bytes.fromhex(content)
        above = found[parent] if parent >= 0 else None
        own = table.hasher(above.digest if above is not None else b"", raw)
        if own.hex() != digest:
            raise CacheFileError(f"{path}: prefix {at} has digest {digest[:12]}, its tokens give {own.hex()[:12]}")
        prefix = Prefix(above, raw, own)
        held = ((pool, pool.lookup(prefix)) for pool in table.pools.values())
        # The cache's own object where it has one, so that chains share their parents.
        found.append(next((pool.prefix(b) or prefix for pool, b in held if b is not None), prefix))
    return found


def _description(cache: PagedKVCache, identity: str) -> dict[str, Any]:
    """What a file and a cache must have in common."""
    groups = [asdict(g) | {"layers": list(g.layers)} for g in cache.groups]
    return {
        "block_size": cache.block_size,
        "dtype": str(cache.dtype).removeprefix("torch."),
        "layout": cache.layout,
        "groups": groups,
        "identity": identity,
    }


def _check_same(path: Path, manifest: dict, own: dict) -> None:
    for what, mine in own.items():
        theirs = manifest.get(what)
        if theirs != mine:
            raise CacheFileError(
                f"{path} was saved with {what} {theirs!r}, this cache has {mine!r}; nothing was loaded. Keep a file "
                "for each model and cache"
            )


def _manifest(path: Path, metadata: dict[str, str] | None) -> dict:
    if not metadata or metadata.get("format") != FORMAT:
        found = (metadata or {}).get("format", "no format")
        raise CacheFileError(f"{path} is no saved prefix cache: its metadata say {found!r}, expected {FORMAT!r}")
    return json.loads(metadata["manifest"])


def _seal(path: Path) -> None:
    """Put the digest of everything before it into the last bytes, and the file onto the disk."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        digest = _digest(file, size - SEAL_BYTES)
        file.seek(size - SEAL_BYTES)
        if file.read() != bytes(SEAL_BYTES):
            raise AssertionError("the seal is not the last tensor of the file")
        file.seek(size - SEAL_BYTES)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _check_seal(path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SEAL_BYTES:
            raise CacheFileError(f"{path} has {size} bytes; it is no saved prefix cache, or was cut off")
        digest = _digest(file, size - SEAL_BYTES)
        if file.read(SEAL_BYTES) != digest:
            raise CacheFileError(
                f"{path} is damaged or is no saved prefix cache: its last {SEAL_BYTES} bytes are not the digest of the "
                "rest. Nothing was loaded; delete it and save again"
            )


def _digest(file: Any, size: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=SEAL_BYTES)
    file.seek(0)
    left = size
    while left and (part := file.read(min(left, 1 << 20))):
        hasher.update(part)
        left -= len(part)
    return hasher.digest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as safetensors."""
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CacheFileError(f"{path} is no safetensors file: {error}") from error
    with file:
        yield file


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading a cache needs safetensors: pip install 'pagetile[hf]'") from error
    return safetensors.torch


def _remove_leftovers(path: Path) -> None:
    """Files of savers that died."""
    for leftover in path.parent.glob(f".{path.name}.partial-*"):
        pid = leftover.name.rpartition("-")[2]
        if pid.isdigit() and int(pid) != os.getpid() and not _runs(int(pid)):
            leftover.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Let the rename survive a power cut, where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
