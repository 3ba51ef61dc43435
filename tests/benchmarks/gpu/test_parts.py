"""Each part over the stand-in: that it finds all well, and finds what is not."""

import dataclasses
import functools
import time

import jax
import numpy as np
import pytest
from stand_in_timer import grows

import jaxcomm
from bench.gpu import device_memory, strategies, torch_peer
from bench.gpu.parts import PARTS


def run(name, timer):
    return list(PARTS[name](timer))


# Parts that look whether something is right.


def test_memory_tells_sharing_from_owning(timer):
    *rows, first, later = run("memory", timer)
    assert len(rows) == 8
    assert first.values["taken_bytes"] == later.values["taken_bytes"] == 0
    assert later.is_right is True
    shared, own = (
        {row.values["each_bytes"] for row in rows[i : i + 4]} for i in (0, 4)
    )
    assert max(shared) < min(own)
    assert all(row.values["parent_bytes"] > 0 for row in rows)


def settled_free_bytes():
    """Return what is free once what ended before has given its memory back."""
    found, last = device_memory.free_bytes(), None
    while found != last:
        time.sleep(0.1)
        found, last = device_memory.free_bytes(), found
    return found


def test_the_driver_is_asked_for_what_is_free(timer):
    before = settled_free_bytes()
    jaxcomm.init(timer.mesh, "i")
    taken = before - device_memory.free_bytes()
    assert 0 < device_memory.communicators_bytes() <= taken


def test_hops_that_take_memory_each_time_are_wrong(timer, monkeypatch):
    grows(monkeypatch, "left_bytes", -8)
    *_, first, later = run("memory", timer)
    assert first.is_right is None
    assert (later.is_right, later.values["taken_bytes"]) == (False, 8)


def test_arrays_of_a_pool_are_compared_with_ordinary_ones(timer):
    registered, *rows, recorded = run("symmetric", timer)
    assert recorded.is_right is True
    assert registered.found == "window"
    assert [row.is_right for row in rows[::2]] == [True] * 6
    assert all(row.ratio > 0 for row in rows[1::2])
    # XLA:CPU puts no result there.
    assert rows[0].found == (
        "right; 0 of 1 calls in registered memory, 0 by copy engines"
    )


def test_what_xla_does_not_lend_is_said(timer):
    (row,) = run("borrowed", timer)
    assert row.is_right is None
    assert "XLA lends communicators of NVIDIA GPUs" in row.found


def test_what_torch_cannot_do_is_said(timer):
    (row,) = run("torch", timer)
    assert row.is_right is None
    assert row.found == "not measured: torch's NCCL needs GPUs"


def test_what_is_not_a_number_differs_wherever_it_is():
    right, spoilt = np.ones(3), np.array([1, np.nan, 1])
    assert torch_peer.largest_difference([right * 2, right], [right, right]) == 1
    for ours, theirs in ((right, spoilt), (spoilt, right)):
        found = torch_peer.largest_difference([right, ours], [right, theirs])
        assert not found < 1


# Parts that compare.


@pytest.fixture
def usual_promotion():
    """What jax.nn's attention needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("name", "count", "asked"),
    [
        ("collectives", 15, 14),
        ("overlap", 2, 0),
        ("lanes", 2, 0),
        ("attention", 10, 6),
        ("strategies", 6, 2),
        ("masks", 8, 8),
    ],
)
def test_comparisons_say_what_with_what(name, count, asked, timer, usual_promotion):
    rows = run(name, timer)
    assert len(rows) == count
    assert sum(row.least is not None for row in rows) == asked
    assert all(min(row.ours, row.theirs, row.ratio) > 0 for row in rows)
    assert len({(row.name, row.peer) for row in rows}) == count


@pytest.mark.parametrize(
    ("size", "key_heads", "expected"),
    [
        (2, 8, ["all_gather", "ulysses"]),
        (8, 8, ["all_gather", "ulysses", "usp of 4 x 2", "usp of 2 x 4"]),
        (8, 3, ["all_gather", "ulysses", "usp of 4 x 2", "usp of 2 x 4"]),
        (3, 8, ["all_gather"]),
    ],
)
def test_strategies_are_those_that_are_possible(size, key_heads, expected):
    layout = jaxcomm.Layout("zigzag", size, 48 * size)
    heads = {"heads": 8 * key_heads, "key_heads": key_heads, "head_size": 8}
    plan = functools.partial(jaxcomm.attention.plan, layout, is_causal=True, **heads)
    assert list(strategies.strategies_of(plan, size)) == expected


def test_three_ranks_split_what_they_can(timer):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((3,), ("i",), auto, devices=jax.devices()[:3])
    assert len(run("collectives", dataclasses.replace(timer, mesh=mesh))) == 15


def test_two_lanes_are_two_communicators(timer, trace):
    run("lanes", timer)
    used = {m.lane: m.stats()["calls"] for m in jaxcomm.communicators()}
    # Twice compared, in two rounds of one call and two more, with one exchange on each
    # lane; and once with both on the left.
    assert used == {"left": {"permute": 12 + 12}, "right": {"permute": 12}}
    assert len({call["comm"] for call in trace("ncclSend")}) == 2 * 2


def test_ranks_on_one_gpu_are_compared_with_all_of_it(timer, usual_promotion):
    peers = [
        next(row.peer for row in PARTS["attention"](each) if "one " in row.peer)
        for each in (timer, dataclasses.replace(timer, shares_gpu=True))
    ]
    assert peers == [
        "one xla kernel over the whole sequence, divided by 2",
        "one xla kernel over the whole sequence",
    ]


def test_the_pool_of_jax_is_nobodys_loss(timer, monkeypatch):
    class Gpu:
        def memory_stats(self):
            return {"pool_bytes": 30, "bytes_in_use": 20}

    class Other:
        def memory_stats(self):
            return None

    monkeypatch.setattr(device_memory, "free_bytes", lambda: 100)
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu(), Gpu(), Other()])
    assert device_memory.left_bytes() == 160
    assert device_memory.in_use_by_jax() == 40
