"""Over the stand-in, each part of the acceptance sees what it is to see."""

import itertools

import pytest
from gpu_acceptance import PARTS, checks, soak, steady
from stand_in_timer import grows
from stand_in_timer import timer as timer

import jaxcomm


def run(name, timer):
    return list(PARTS[name](timer))


def test_checks_name_what_is_wrong_and_what_fails(timer, monkeypatch):
    def fails(x):
        raise RuntimeError("no scan today")

    ours, theirs = checks.calls(2)
    broken = ours | {"psum": lambda x: x, "pscan": fails}
    monkeypatch.setattr(checks, "calls", lambda size: (broken, theirs))
    right, _ = run("checks", timer)
    assert right.is_right is False
    assert right.found == (
        f"{len(ours) - 2} of {len(ours)}; psum of int8: other values than XLA's; "
        "pscan of int8: no scan today"
    )


@pytest.mark.parametrize("function", ["left_bytes", "peak_of_jax"])
def test_lengths_that_take_memory_are_wrong(function, timer, monkeypatch):
    grows(monkeypatch, function, -8 if function == "left_bytes" else 8)
    rows = run("lengths", timer)
    assert [row.is_right for row in rows] == [
        function != "left_bytes",
        function != "peak_of_jax",
    ]


def test_lengths_that_make_communicators_are_wrong(timer, monkeypatch):
    ring_attention = jaxcomm.ring_attention
    lanes = itertools.cycle("01")

    def with_a_lane(*x, **options):
        return ring_attention(*x, lane=next(lanes), **options)

    monkeypatch.setattr(jaxcomm, "ring_attention", with_a_lane)
    row, _ = run("lengths", timer)
    assert row.is_right is False
    assert row.values["made"] == 1
    assert row.values["grown_bytes"] > 0


def test_a_wrong_result_is_seen_in_the_soak(timer, monkeypatch):
    ppermute = jaxcomm.ppermute

    def stays(x, *arguments, backend, lane):
        moved = ppermute(x, *arguments, backend=backend, lane=lane)
        return moved if backend == "xla" else x

    monkeypatch.setattr(jaxcomm, "ppermute", stays)
    mixed, *_ = run("soak", timer)
    assert mixed.is_right is False
    assert mixed.values["wrong"] == 4 + 1


def test_a_lost_broadcast_is_seen(timer, monkeypatch):
    monkeypatch.setattr(jaxcomm, "pbroadcast", lambda x, *_, **at: x)
    assert soak._in_a_row(timer).is_right is False


@pytest.mark.parametrize("function", ["free_bytes", "communicators_bytes"])
def test_memory_that_grows_in_the_soak_is_wrong(function, timer, monkeypatch):
    grows(monkeypatch, function, -(4 << 20) if function == "free_bytes" else 1)
    mixed, memory, _ = run("soak", timer)
    assert mixed.is_right is True
    assert memory.is_right is False


def test_calls_that_allocate_are_named(timer, monkeypatch):
    grows(monkeypatch, "free_bytes", -8)
    # As if a sum were an allocation.
    monkeypatch.setattr(steady, "_FORBIDDEN", {"ncclAllReduce", "cuMemAlloc_v2"})
    memory, calls = run("steady", timer)
    assert memory.is_right is False
    assert "'psum': 8" in memory.found
    assert calls.is_right is False
    assert "'ncclAllReduce': " in calls.found
    assert "cuMemAlloc_v2" not in calls.found
