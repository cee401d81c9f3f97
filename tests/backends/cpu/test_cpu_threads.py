"""Threads: torch's own team, any number of it, from several Python threads, and after a fork."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_kit import attend_call, run_python, write_call

from pagetile.backends.cpu import launch


def bits(call) -> tuple[bytes, bytes]:
    return call.out.numpy().tobytes(), call.lse.numpy().tobytes()


def calls():
    """Many decodes, one long context (which is split for parallelism), a mixed batch."""
    yield attend_call([1] * 9, [1, 5, 40, 130, 600, 16, 17, 0, 33])
    yield attend_call([1], [5000], heads=1)
    yield attend_call([40, 1, 0, 7], [40, 300, 9, 1500], group=2, size=40)


def test_the_runtime_is_the_one_torch_uses() -> None:
    """One OpenMP runtime in the process, before and after: torch's."""
    code = """
import torch
torch.zeros(1 << 20).add_(1)
def runtimes():
    lines = open("/proc/self/maps").read().split()
    return sorted({x for x in lines if any(n in x for n in ("libgomp", "libiomp", "libomp"))})
before = runtimes()
torch.set_num_threads(2)
from cpu_kit import attend_call
from pagetile.backends.cpu import CpuBackend, launch
call = attend_call([1] * 9, [300] * 9)
CpuBackend().attend(call)
print(launch.openmp() is not None, len(before), runtimes() == before)
"""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    if launch.openmp() is None:
        pytest.skip("torch has no GOMP_parallel here: one thread is used")
    assert run_python(code).stdout.split() == ["True", "1", "True"]


@pytest.mark.parametrize("threads", [2, 3, 7, 31])
def test_any_number_of_threads_gives_the_same_bits(backend, threads: int) -> None:
    for one, many in zip(calls(), calls(), strict=True):
        torch.set_num_threads(1)
        backend.attend(one)
        torch.set_num_threads(threads)
        backend.attend(many)
        assert bits(one) == bits(many)


def test_more_than_one_thread_really_works(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own counter of workers says how many came."""
    if launch.openmp() is None:
        pytest.skip("one thread is used here")
    from pagetile.backends.cpu import attend as host
    from pagetile.backends.cpu import params as P

    workers = []

    def spy(kernel, block, threads):
        launch.launch(kernel, block, threads)
        workers.append((threads, host.MEMORY.integers[P.A_WORKER]))

    monkeypatch.setattr(host, "launch", spy)
    torch.set_num_threads(2)
    backend.attend(attend_call([1] * 9, [300] * 9))
    torch.set_num_threads(1)
    backend.attend(attend_call([1] * 9, [300] * 9))
    backend.attend(attend_call([1], [10], heads=1))
    assert workers == [(2, 2), (1, 1), (1, 1)]


def test_python_threads_at_once(backend) -> None:
    """Each has its own parameter block and scratch, so calls of different shapes do not meet."""
    torch.set_num_threads(2)
    expected = []
    for call in calls():
        backend.attend(call)
        expected.append(bits(call))
    start = threading.Barrier(4)

    def work(_worker: int) -> bool:
        start.wait()
        right = True
        for _ in range(10):
            for call, wanted in zip(calls(), expected, strict=True):
                backend.attend(call)
                right = right and bits(call) == wanted
        return right

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


def test_a_large_write_uses_threads_and_stores_every_row(backend) -> None:
    torch.set_num_threads(3)
    key, value = torch.randn(3000, 2, 64), torch.randn(3000, 2, 64)
    slots = torch.randperm(4000)[:3000]
    k, v = torch.zeros(250, 16, 2, 64), torch.zeros(250, 16, 2, 64)
    call = write_call(key, value, k, v, slots)
    assert backend.plan(call).threads == launch.available_threads()
    backend.write(call)
    assert torch.equal(k.view(4000, 2, 64)[slots], key)
    assert torch.equal(v.view(4000, 2, 64)[slots], value)
    assert k.count_nonzero() <= key.numel()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork(backend) -> None:
    """The child of a process that used the team runs on one thread, and gets the same bits."""
    torch.set_num_threads(2)
    again, expected = list(calls()), []  # made before: torch's own parallel operators would hang in the child
    for call in calls():
        backend.attend(call)
        expected.append(bits(call))
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends as a failure
        right = launch.available_threads() == 1
        for call, wanted in zip(again, expected, strict=True):
            backend.attend(call)
            right = right and bits(call) == wanted
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for call, wanted in zip(again, expected, strict=True):  # and the parent is as before
        backend.attend(call)
        assert bits(call) == wanted
