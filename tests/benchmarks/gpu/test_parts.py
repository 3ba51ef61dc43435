"""Each part over the stand-in: that it finds all well, and finds what is not."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import waiting
from stand_in_timer import grows

import jaxcomm
from bench.gpu import device_memory, strategies, torch_peer
from bench.gpu.parts import PARTS
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer

# Of the stand-in: eight devices of 16 GiB.
ALL_MEMORY = 8 << 34


def run(name, timer):
    return list(PARTS[name](timer))


# Parts that look whether something is right.


def test_memory_tells_sharing_from_owning_and_hops_that_take_some(timer, monkeypatch):
    *rows, first, later = run("memory", timer)
    assert len(rows) == 8
    assert first.values["taken_bytes"] == later.values["taken_bytes"] == 0
    assert later.is_right is True
    shared, own = (
        {row.values["each_bytes"] for row in rows[i : i + 4]} for i in (0, 4)
    )
    assert max(shared) < min(own)
    assert all(row.values["parent_bytes"] > 0 for row in rows)
    grows(monkeypatch, "left_bytes", -8)
    *_, first, later = run("memory", timer)
    assert first.is_right is None
    assert (later.is_right, later.values["taken_bytes"]) == (False, 8)


def test_the_driver_is_asked_for_what_is_free(timer):
    jaxcomm.init(timer.mesh, "i")
    held = device_memory.communicators_bytes()
    assert held > 0

    def taken():
        return ALL_MEMORY - device_memory.free_bytes()

    # What ended before gives its memory back in its own time.
    waiting.until(lambda: held <= taken() < 2 * held)
    jaxcomm.finalize()
    waiting.until(lambda: taken() < held)


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


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("borrowed", "XLA lends communicators of NVIDIA GPUs"),
        ("torch", "not measured: torch's NCCL needs GPUs"),
    ],
)
def test_what_needs_gpus_says_so(name, found, timer):
    (row,) = run(name, timer)
    assert row.is_right is None
    assert found in row.found


def test_what_is_not_a_number_differs_wherever_it_is():
    right, spoilt = np.ones(3), np.array([1, np.nan, 1])
    assert torch_peer.largest_difference([right * 2, right], [right, right]) == 1
    for ours, theirs in ((right, spoilt), (spoilt, right)):
        assert math.isnan(torch_peer.largest_difference([right, ours], [right, theirs]))


# Parts that compare.


@pytest.fixture
def usual_promotion():
    """What jax.nn's attention needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def untimed(monkeypatch, usual_promotion):
    """Has nothing compiled or timed. What is compared with what is left."""

    def compare(self, name, ours, peer, theirs, *, least=None, share=1, **options):
        return Figure(name, 1.0, peer, share, share, least)

    monkeypatch.setattr(Timer, "compare", compare)


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
def test_comparisons_say_what_with_what(name, count, asked, timer, untimed):
    rows = run(name, timer)
    assert len(rows) == count
    assert sum(row.least is not None for row in rows) == asked
    assert len({(row.name, row.peer) for row in rows}) == count


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("overlap", 2),
        # An odd number splits nothing that happens to be even.
        ("collectives", 3),
        *(
            pytest.param(name, 2, marks=pytest.mark.thorough)
            for name in ("attention", "strategies", "masks")
        ),
    ],
)
def test_what_is_compared_runs(name, ranks, timer, usual_promotion):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((ranks,), ("i",), auto, devices=jax.devices()[:ranks])
    rows = run(name, dataclasses.replace(timer, mesh=mesh))
    assert all(min(row.ours, row.theirs, row.ratio) > 0 for row in rows)


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


def test_two_lanes_are_two_communicators(timer, trace):
    run("lanes", timer)
    used = {m.lane: m.stats()["calls"] for m in jaxcomm.communicators()}
    # Twice compared, in two rounds of one call and two more, with one exchange on each
    # lane; and once with both on the left.
    assert used == {"left": {"permute": 12 + 12}, "right": {"permute": 12}}
    assert len({call["comm"] for call in trace("ncclSend")}) == 2 * 2


@pytest.mark.parametrize(
    ("shares_gpu", "part", "share"), [(False, ", divided by 2", 0.5), (True, "", 1)]
)
def test_ranks_on_one_gpu_are_compared_with_all_of_it(
    shares_gpu, part, share, timer, untimed
):
    rows = run("attention", dataclasses.replace(timer, shares_gpu=shares_gpu))
    row = next(row for row in rows if "one " in row.peer)
    assert row.peer == f"one xla kernel over the whole sequence{part}"
    assert row.theirs == share
