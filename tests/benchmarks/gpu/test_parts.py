"""Each part over the stand-in: that it finds all well, and finds what is not."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from stand_in_timer import grows

import jaxcomm
from bench.gpu import torch_peer
from bench.gpu.parts import PARTS


def run(name, timer):
    return list(PARTS[name](timer))


def test_memory_tells_sharing_from_owning_and_hops_that_take_some(timer, monkeypatch):
    *rows, first, later = run("memory", timer)
    assert len(rows) == 8
    assert first.values["taken_bytes"] == later.values["taken_bytes"] == 0
    assert later.is_right is True
    shared, own = (
        {row.values["each_bytes"] for row in rows[i : i + 4]} for i in (0, 4)
    )
    assert max(shared) < min(own)
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


def test_what_is_not_a_number_differs_wherever_it_is():
    right, spoilt = np.ones(3), np.array([1, np.nan, 1])
    assert torch_peer.largest_difference([right * 2, right], [right, right]) == 1
    for ours, theirs in ((right, spoilt), (spoilt, right)):
        assert math.isnan(torch_peer.largest_difference([right, ours], [right, theirs]))


@pytest.fixture
def usual_promotion():
    """What jax.nn's attention needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


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
    assert len(rows) == len({(row.name, row.peer) for row in rows})
    assert all(min(row.ours, row.theirs, row.ratio) > 0 for row in rows)


def test_two_lanes_are_two_communicators(timer, trace):
    run("lanes", timer)
    used = {m.lane: m.stats()["calls"] for m in jaxcomm.communicators()}
    # Twice compared, in two rounds of one call and two more, with one exchange on each
    # lane; and once with both on the left.
    assert used == {"left": {"permute": 12 + 12}, "right": {"permute": 12}}
    assert len({call["comm"] for call in trace("ncclSend")}) == 2 * 2
