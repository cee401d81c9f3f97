"""Prefixes: strong, chained, equal in every process, and compared token by token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pagetile.cache import prefix as prefix_module
from pagetile.cache.prefix import Prefix, blake2b, chain, token_array
from pagetile.contracts.errors import ArgumentError, DTypeError, ShapeError

DIGESTS = f"""
import sys, types
package = types.ModuleType("pagetile.cache")        # the package without its tensors: two imports of torch less
package.__path__ = [{str(Path(prefix_module.__file__).parent)!r}]
sys.modules["pagetile.cache"] = package
from pagetile.cache.prefix import chain
for salt in (None, "tenant", b"raw", 7):
    print([p.digest.hex() for p in chain([1, -5, 2**40, 70000, 0, 9], 2, salt)])
"""


def constant(_parent: bytes, _content: bytes) -> bytes:
    """The worst hash there is."""
    return b"x"


def digests(tokens, block_size: int = 4, salt=None) -> list[bytes]:
    return [p.digest for p in chain(tokens, block_size, salt)]


def test_equal_in_every_process() -> None:
    """vllm-project/vllm#51875, LMCache/LMCache#1139: hashes must not depend on the process or PYTHONHASHSEED."""
    seeds = ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("0", "4242"))
    runs = [subprocess.Popen([sys.executable, "-c", DIGESTS], env=e, stdout=subprocess.PIPE, text=True) for e in seeds]
    found = {run.communicate(timeout=120)[0] for run in runs}
    assert len(found) == 1
    (text,) = found
    assert list(chain([1, -5, 2**40, 70000, 0, 9], 2, 7))[-1].digest.hex() in text  # and in this one
    assert len(set(text.split())) == 4 * 3  # four salts, three blocks, all different


@pytest.mark.parametrize(
    ("a", "b"),
    [(65, 321), (1, 1 + 2**16), (1, 1 + 2**32), (-1, 255), (-1, 2**32 - 1), (0, -(2**63))],
)
def test_every_bit_of_a_token_id_counts(a: int, b: int) -> None:
    """waybarrios/vllm-mlx#444: ids cut to 8 bits made [65]*BS hit [321]*BS."""
    assert digests([a] * 4) != digests([b] * 4)


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        lambda x: np.asarray(x, dtype=np.int32),
        lambda x: np.asarray(x, dtype=np.uint64),
        lambda x: [np.int64(i) for i in x],
        torch.tensor,
        iter,
    ],
)
def test_the_form_of_the_ids_does_not_count(form) -> None:
    tokens = [3, 70000, 1, 2, 9, 9, 9, 9]
    assert digests(form(tokens)) == digests(tokens)


def test_position_parent_salt_and_block_size_count() -> None:
    first, second = digests([7] * 8)
    assert first != second  # same tokens, other parent
    assert digests([7] * 8, salt="a")[0] != first
    assert len({digests([7] * 4, salt=s)[0] for s in (None, 1, "1", b"1", "", b"")}) == 6
    assert digests([7] * 8, block_size=8)[0] not in (first, second)


def test_only_full_blocks_and_continuation() -> None:
    assert digests([1, 2, 3]) == []
    (head,) = chain([1, 2, 3, 4], 4, "s")
    continued = [p.digest for p in chain([5, 6, 7, 8, 9], 4, parent=head)]
    assert [head.digest, *continued] == digests([1, 2, 3, 4, 5, 6, 7, 8], salt="s")


def test_same_compares_content_whatever_the_hash() -> None:
    """vllm-project/vllm#12621: a hash collision must not make two prompts one."""
    a = list(chain([1, 2, 3, 4], 2, None, constant))
    b = list(chain([9, 2, 3, 4], 2, None, constant))
    again = list(chain([1, 2, 3, 4], 2, None, constant))
    salted = list(chain([1, 2, 3, 4], 2, "salt", constant))
    assert a[1].digest == b[1].digest
    assert a[1].content == b[1].content
    assert not a[1].same(b[1])  # they differ in the parent only
    assert not a[1].same(salted[1])  # and here in the root only
    assert a[1].same(again[1])
    assert not a[0].same(a[1])
    assert not a[1].same(a[0])


def test_the_digest_is_a_strong_hash() -> None:
    root = Prefix.root(None, 4)
    assert len(root.digest) == 32
    assert root.digest == blake2b(b"", root.content)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1.0, 2.0], DTypeError),
        (np.array([1.5]), DTypeError),
        ([True, False], DTypeError),
        ("abcd", DTypeError),
        ([2**63], ArgumentError),
        ([2**70, 1], ArgumentError),
        ([[1, 2], [3, 4]], ShapeError),
    ],
)
def test_what_is_not_a_list_of_ids_is_refused(tokens, error: type[Exception]) -> None:
    with pytest.raises(error):
        token_array(tokens)


@pytest.mark.parametrize("salt", [1.5, True, ("a",), object()])
def test_salts_of_no_fixed_bytes_are_refused(salt) -> None:
    """A salt hashed by address (LMCache/LMCache#2979: hash(None)) would differ in every process."""
    with pytest.raises(DTypeError, match="salt"):
        Prefix.root(salt, 4)
