"""The direct launch: the right compiled variant for every pattern of alignment, and no GPU needed to see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagetile.backends.triton import launch as launching
from pagetile.backends.triton.launch import Launch, alignment


class FakeKernel:
    """Compiles one variant for each pattern of alignment, as Triton does, and runs what it is asked to."""

    __name__ = "fake"

    def __init__(self) -> None:
        self.params = [SimpleNamespace(do_not_specialize=False)] * 5
        self.compiled: list[tuple[int, ...]] = []
        self.direct: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def public(*args: Any, **_: Any) -> Any:
            pattern = alignment([x.data_ptr() for x in args if isinstance(x, torch.Tensor)])
            self.compiled.append(pattern)
            run = SimpleNamespace(
                global_scratch_size=0,
                profile_scratch_size=0,
                launch_cooperative_grid=0,
                launch_pdl=0,
                launch=lambda *a: self.direct.append((pattern, a)),
            )
            return SimpleNamespace(run=run, function=7, packed_metadata=("meta", grid))

        return public


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(launching, "direct_launch_known", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    launching.forget()
    return FakeKernel()


def at(offset: int) -> torch.Tensor:
    """A float32 vector ``offset`` elements past a multiple of 16 bytes."""
    buffer = torch.zeros(16)
    first = -(buffer.data_ptr() // 4) % 4
    return buffer[first + offset : first + offset + 4]


def test_each_pattern_of_alignment_has_its_own_variant(fake: FakeKernel) -> None:
    launch = Launch(fake, (3, 2, 1), (5, 2.5), {"WIDTH": 64}, num_warps=4)
    sets = [(at(0), at(0), at(0)), (at(1), at(0), at(0)), (at(0), at(2), at(0)), (at(0), at(0), at(3)), (at(1),) * 3]
    for _ in range(3):
        for tensors in sets:
            launch(0, *tensors)
    patterns = [alignment([x.data_ptr() for x in tensors]) for tensors in sets]
    assert len(set(patterns)) == 5
    assert fake.compiled == patterns  # once each, by the public path
    for n, (pattern, arguments) in enumerate(fake.direct):
        tensors = sets[n % 5]
        assert pattern == patterns[n % 5]
        assert arguments == (
            *(3, 2, 1, 100, 7, 0, 0, None, None, ("meta", (3, 2, 1)), None, None, None),
            *(x.data_ptr() for x in tensors),
            *(5, 2.5, 64),
        )
    assert len(fake.direct) == 10


def test_another_launch_of_the_same_variant_compiles_nothing(fake: FakeKernel) -> None:
    for number in (5, 6, 7):
        Launch(fake, (number, 1, 1), (number, 2.5), {"WIDTH": 64}, num_warps=4)(0, at(0), at(1))
    assert fake.compiled == [(0, 1)]
    assert [a[0] for _, a in fake.direct] == [6, 7]
    for scalars in ((1, 2.5), (16, 2.5), (2**31, 2.5)):  # what Triton specialises an integer by
        Launch(fake, (1, 1, 1), scalars, {"WIDTH": 64}, num_warps=4)(0, at(0), at(1))
    assert len(fake.compiled) == 4


def test_an_unknown_version_takes_the_public_path(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "direct_launch_known", lambda: False)
    launch = Launch(fake, (1, 1, 1), (5,), {}, num_warps=4)
    for _ in range(2):
        launch(0, at(0))
    assert fake.compiled == [(0,), (0,)]
    assert not fake.direct


def test_a_kernel_that_needs_more_than_is_known_takes_the_public_path(fake: FakeKernel) -> None:
    real = fake.__getitem__

    class Scratched(FakeKernel):
        def __getitem__(self, grid: Any) -> Any:
            def public(*args: Any, **how: Any) -> Any:
                compiled = real(grid)(*args, **how)
                compiled.run.global_scratch_size = 128
                return compiled

            return public

    launch = Launch(Scratched(), (1, 1, 1), (5,), {}, num_warps=4)
    for _ in range(2):
        launch(0, at(0))
    assert len(fake.compiled) == 2
    assert not fake.direct
