"""The suite can fail: the faults that others shipped, built into the reference one by one, are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conformance_kit import threads

from pagetile.backends import registry
from pagetile.backends.protocol import AttendCall, Backend, MergeCall, WriteCall
from pagetile.backends.reference import ReferenceBackend
from pagetile.testing import (
    AttendCase,
    WriteCase,
    assert_attend,
    assert_merge,
    attend_cases,
    build_attend,
    build_merge,
    build_write,
    merge_cases,
    same_bits,
    write_cases,
)
from pagetile.testing.layouts import CACHE_FAMILIES, ROW_FAMILIES, cache_storage, row_storage

truth = ReferenceBackend()


def _sees_the_future(call: AttendCall) -> None:
    truth.attend(replace(call, window=(call.window[0], -1)))


def _window_one_too_wide(call: AttendCall) -> None:
    left, right = call.window
    truth.attend(replace(call, window=(left + 1 if left >= 0 else left, right)))


def _table_padding_read(call: AttendCall) -> None:
    """One token too many in each sequence, clamped into the cache: what an unmasked tail does."""
    if call.seq_lens is None or call.block_table is None:
        return truth.attend(call)
    longer = replace(call.problem, max_k_len=call.problem.max_k_len + 1)
    table = call.block_table.clamp(0, len(call.k) - 1)
    return truth.attend(replace(call, seq_lens=call.seq_lens + 1, block_table=table, problem=longer))


def _nan_times_zero(call: AttendCall) -> None:
    truth.attend(call)
    if call.v.float().isnan().any():
        call.out[: int(call.query_start_loc[-1])] += call.v.float().sum() * 0


def _base_two(call: AttendCall) -> None:
    truth.attend(call)
    if call.lse is not None:
        call.lse[:, : int(call.query_start_loc[-1])] /= 0.6931471805599453


def _empty_is_plus_inf(call: AttendCall) -> None:
    truth.attend(call)
    if call.lse is not None:
        call.lse[call.lse.isneginf()] = torch.inf


def _dropped(**fields: object) -> Callable[[AttendCall], None]:
    return lambda call: truth.attend(replace(call, **fields))


def _other_scale(call: AttendCall) -> None:
    padded = 1 << (call.q.shape[-1] - 1).bit_length()
    truth.attend(replace(call, scale=padded**-0.5))


def _scores_slightly_off(call: AttendCall) -> None:
    truth.attend(replace(call, q=(call.q.float() * 1.001).to(call.q.dtype)))


def _writes_spare_rows(call: AttendCall) -> None:
    truth.attend(call)
    call.out[int(call.query_start_loc[-1]) :] = 0


def _touches_the_cache(call: AttendCall) -> None:
    truth.attend(call)
    if call.k.numel():
        call.k.select(-1, 0).fill_(1)


ATTEND_FAULTS: dict[str, Callable[[AttendCall], None]] = {
    "causal forgotten": _sees_the_future,
    "window off by one": _window_one_too_wide,
    "tail of the page": _table_padding_read,
    "0 times NaN": _nan_times_zero,
    "log-sum-exp in base 2": _base_two,
    "empty rows marked +inf": _empty_is_plus_inf,
    "sinks dropped": _dropped(sinks=None),
    "alibi dropped": _dropped(alibi_slopes=None),
    "softcap dropped": _dropped(softcap=0.0),
    "left padding dropped": _dropped(key_starts=None),
    "k_scale dropped": _dropped(k_scale=None),
    "v_scale dropped": _dropped(v_scale=None),
    "scale of a padded head": _other_scale,
    "scores off by a thousandth": _scores_slightly_off,
    "spare rows written": _writes_spare_rows,
    "cache written": _touches_the_cache,
}


@pytest.mark.parametrize("fault", ATTEND_FAULTS, ids=lambda f: f.replace(" ", "_"))
def test_an_attention_fault_is_caught(fault: str) -> None:
    def caught(case: AttendCase) -> bool:
        built = build_attend(case)
        ATTEND_FAULTS[fault](built.call)
        try:
            assert_attend(built)
        except AssertionError:
            return True
        return any(canary.broken() for canary in built.canaries)

    with threads(1):
        assert any(caught(case) for case in attend_cases(truth, seed=1, count=0))


def _swap_k_and_v(call: WriteCall) -> None:
    truth.write(replace(call, key=call.value, value=call.key) if call.key.shape == call.value.shape else call)


def _minus_one_wraps(call: WriteCall) -> None:
    slots = call.key_cache.shape[0] * call.key_cache.shape[1]
    if call.problem.layout == "paged":
        truth.write(replace(call, slot_mapping=torch.where(call.slot_mapping == -1, slots - 1, call.slot_mapping)))


def _reads_spare_rows(call: WriteCall) -> None:
    rows = len(call.key)
    free = torch.arange(rows, dtype=call.slot_mapping.dtype)
    truth.write(replace(call, slot_mapping=torch.cat([call.slot_mapping, free[len(call.slot_mapping) :]])))


def _e4m3_for_all(call: WriteCall) -> None:
    kind = "fp8_e4m3" if call.problem.kind == "fp8_e5m2" else call.problem.kind
    truth.write(replace(call, problem=replace(call.problem, kind=kind)))


def _scale_dropped(call: WriteCall) -> None:
    truth.write(call if call.problem.scale == "token_head" else replace(call, k_scale=None))


WRITE_FAULTS = {
    "k and v swapped": _swap_k_and_v,
    "-1 is the last slot": _minus_one_wraps,
    "rows past the slots": _reads_spare_rows,
    "e4m3 for e5m2": _e4m3_for_all,
    "scale dropped": _scale_dropped,
}


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda f: f.replace(" ", "_"))
def test_a_write_fault_is_caught(fault: str) -> None:
    def caught(case: WriteCase) -> bool:
        built = build_write(case)
        WRITE_FAULTS[fault](built.call)
        return not all(same_bits(got, right) for got, right in zip(built.buffers, built.expected, strict=True))

    with threads(1):
        assert any(caught(case) for case in write_cases(truth, seed=1, count=0))


def _merge_wrongly(fault: str, call: MergeCall) -> None:
    if fault == "base 2":
        truth.merge(replace(call, a_lse=call.a_lse * 0.6931471805599453, b_lse=call.b_lse * 0.6931471805599453))
    elif fault == "lse read as contiguous":
        shape = call.a_lse.shape
        flat = call.a_lse.as_strided(shape, (shape[1], 1)) if call.a_lse.numel() else call.a_lse
        truth.merge(replace(call, a_lse=flat))
    else:
        truth.merge(call)
        call.out.copy_(call.out + call.out.isnan().logical_not() * 1e-3)


@pytest.mark.parametrize("fault", ["base 2", "lse read as contiguous", "off by a thousandth"])
def test_a_merge_fault_is_caught(fault: str) -> None:
    def caught(built) -> bool:
        _merge_wrongly(fault, built.call)
        try:
            assert_merge(built)
        except AssertionError:
            return True
        return False

    assert any(caught(build_merge(case)) for case in merge_cases(truth, seed=1, count=0))


def test_every_family_is_a_view_with_room_round_it() -> None:
    for family in CACHE_FAMILIES:
        storage = cache_storage(family, 4, 3, 2, 8, 8)
        buffers = storage.allocate(torch.float32)
        k, v = storage.look(buffers)
        assert k.shape == v.shape == (4, 3, 2, 8), family
        k.fill_(1)
        v.fill_(2)
        total = sum(b.numel() for b in buffers)
        assert sum(int((b == 1).sum() + (b == 2).sum()) for b in buffers) == k.numel() + v.numel() < total, family
    for family in ROW_FAMILIES:
        buffers = row_storage(family, 5, 3, 8).allocate(torch.float32)
        (rows,) = row_storage(family, 5, 3, 8).look(buffers)
        rows.fill_(1)
        assert rows.shape == (5, 3, 8)
        assert (buffers[0] == 1).sum() == rows.numel() < buffers[0].numel(), family


def test_cases_are_the_same_in_every_run() -> None:
    first, second = ([str(c) for c in attend_cases(truth, 7, 20)] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("name", [n for n, e in registry.BACKENDS.items() if not e.devices or "cpu" in e.devices])
def test_the_backends_of_this_machine_take_every_floating_case(name: str) -> None:
    """A backend that refused half of the cases would pass the suite; what the CPU's may refuse is written here."""
    backend = registry.load(name)
    if isinstance(backend, str):
        pytest.skip(backend)
    _takes_floating(backend)


def _takes_floating(backend: Backend) -> None:
    for draw in (attend_cases, write_cases, merge_cases):
        for case in draw(truth, 3, 300):
            if getattr(case, "kind", "") or getattr(case, "layout", "") == "xpacked":
                continue
            assert backend.why_not(case.problem()) == [], case
