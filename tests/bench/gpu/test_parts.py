"""Each part over the stand-in: that it finds all well, and finds what is not."""

import collections
import dataclasses
import itertools

import jax
import pytest

import jaxcomm
from jaxcomm.bench.gpu import checks, device_memory, driver_calls, soak, steady
from jaxcomm.bench.gpu.parts import PARTS


def run(name, timer):
    return list(PARTS[name](timer))


def grows(monkeypatch, function, step):
    """Has each look at device memory find more than the one before."""
    counted = itertools.count(0, step)
    monkeypatch.setattr(device_memory, function, lambda: next(counted))


# Parts that look whether something is right.


def test_checks_find_all_right_and_one_libnccl(timer, stand_in_path):
    right, loaded = run("checks", timer)
    assert (right.found, right.is_right) == ("27 of 27", True)
    assert (loaded.found, loaded.is_right) == (stand_in_path, True)


def test_checks_name_what_is_wrong_and_what_fails(timer, monkeypatch):
    def fails(x):
        raise RuntimeError("no scan today")

    ours, theirs = checks.calls(2)
    broken = ours | {"psum": lambda x: x, "scan": fails}
    monkeypatch.setattr(checks, "calls", lambda size: (broken, theirs))
    right, _ = run("checks", timer)
    assert right.is_right is False
    assert right.found == (
        "25 of 27; psum of int8: other values than XLA's; scan of int8: no scan today"
    )


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


def test_lengths_make_no_communicator(timer):
    row, steps = run("lengths", timer)
    assert row.is_right is True
    assert row.values["made"] == row.values["grown_bytes"] == 0
    assert row.values["taken_bytes"] == 0
    assert row.values["held_bytes"] > 0
    assert steps.is_right is True


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


def test_the_soak_is_right_and_flat(timer, trace):
    mixed, memory, in_a_row = run("soak", timer)
    assert [row.is_right for row in (mixed, memory, in_a_row)] == [True] * 3
    # Four programs to warm up, then as many operations as were asked for.
    assert mixed.values["operations"] == (4 + 1) * 80
    assert memory.values["communicators"] == 0
    assert in_a_row.name == "100 broadcasts in a row"
    # On each of two ranks: one a turn, then those in a row.
    assert len(trace("ncclBroadcast")) == 2 * ((4 + 1) * 10 + 100)
    used = [m.stats()["calls"] for m in jaxcomm.communicators() if m.backend == "nccl"]
    # Two meshes of two lanes; one of these has the broadcasts in a row too.
    assert sorted(calls["broadcast"] for calls in used) == [10, 10, 20, 110]


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


def test_steady_calls_allocate_nothing(timer):
    memory, calls, returns = run("steady", timer)
    assert memory.is_right is True
    assert memory.found == (
        "0 B less left by all but JAX's pool; communicators hold 0 B more"
    )
    assert calls.is_right is True
    assert 0 < returns.values["returned"] <= returns.values["done"]


def test_calls_that_allocate_are_named(timer, monkeypatch):
    grows(monkeypatch, "free_bytes", -8)
    # As if a sum were an allocation.
    monkeypatch.setattr(steady, "_FORBIDDEN", {"ncclAllReduce", "cuMemAlloc_v2"})
    memory, calls, _ = run("steady", timer)
    assert memory.is_right is False
    assert "'psum': 8" in memory.found
    assert calls.is_right is False
    assert "'ncclAllReduce': " in calls.found
    assert "cuMemAlloc_v2" not in calls.found


def test_the_driver_is_asked_for_what_is_free(timer):
    before = device_memory.free_bytes()
    jaxcomm.init(timer.mesh, "i")
    taken = before - device_memory.free_bytes()
    assert 0 < device_memory.communicators_bytes() <= taken


def test_hops_that_take_memory_each_time_are_wrong(timer, monkeypatch):
    grows(monkeypatch, "left_bytes", -8)
    *_, first, later = run("memory", timer)
    assert first.is_right is None
    assert (later.is_right, later.values["taken_bytes"]) == (False, 8)


@pytest.mark.parametrize(
    ("control", "in_calls", "found", "is_right"),
    [
        (driver_calls._CONTROLS, [], "none", True),
        (
            driver_calls._CONTROLS, ["cuStreamSynchronize"] * 2,
            "{'cuStreamSynchronize': 2}", False,
        ),
        (["cuMemAlloc_v2"], [], "not known: of ('cuMemAlloc_v2', 'cuMemFree_v2'", None),
    ],
)  # fmt: skip
def test_driver_calls_of_collectives_are_told(
    timer, monkeypatch, control, in_calls, found, is_right
):
    told = iter([control, in_calls])
    monkeypatch.setattr(
        driver_calls, "counts", lambda run: collections.Counter(next(told))
    )
    row = driver_calls.finding(timer, {"psum": lambda x: x}, 1.0)
    assert found in row.found
    assert row.is_right is is_right


def test_without_cupti_nothing_is_known_of_the_driver(timer, monkeypatch):
    monkeypatch.setattr(driver_calls, "_library", lambda: "libcupti-of-nobody.so")
    row = driver_calls.finding(timer, {}, 1.0)
    assert "not known: libcupti-of-nobody.so: cannot open" in row.found
    assert row.is_right is None


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


# Parts that compare.


@pytest.fixture
def usual_promotion():
    """What jax.nn's attention needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("name", "count", "asked"),
    [("collectives", 15, 14), ("overlap", 2, 0), ("lanes", 2, 0), ("attention", 10, 6)],
)
def test_comparisons_say_what_with_what(name, count, asked, timer, usual_promotion):
    rows = run(name, timer)
    assert len(rows) == count
    assert sum(row.least is not None for row in rows) == asked
    assert all(min(row.ours, row.theirs, row.ratio) > 0 for row in rows)
    assert len({(row.name, row.peer) for row in rows}) == count


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
