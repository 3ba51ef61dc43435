"""Costs agree with published closed forms, with nccl-tests, and with the engines."""

import dataclasses
import math

import jax
import pytest

import jaxcomm
from jaxcomm.machine import Sample
from jaxcomm.planning.closed_forms import form

F32 = "float32"


def shape(size, dtype=F32):
    return jax.ShapeDtypeStruct((size,), dtype)


# Bus bandwidth is algorithm bandwidth times this: nccl-tests, doc/PERFORMANCE.md. Size
# is that of the larger buffer.
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "permute": lambda n: 1,
}


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("name", BUS)
def test_bytes_are_those_of_nccl_tests(name, ranks):
    operand = 1200 * ranks
    larger = operand * (ranks if name in ("all_gather", "gather") else 1)
    assert form(name, ranks, operand).bytes == pytest.approx(larger * BUS[name](ranks))


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_steps_are_those_of_thakur_et_al(ranks):
    """IJHPCA 19(1), 2005: rings of section 4, pairwise exchange of 4.3."""
    assert form("all_gather", ranks, 1).steps == ranks - 1
    assert form("all_reduce", ranks, 1).steps == 2 * (ranks - 1)
    assert form("reduce_scatter", ranks, 1).steps == ranks - 1
    assert form("all_to_all", ranks, 1).steps == ranks - 1


def test_what_has_no_form_is_refused():
    with pytest.raises(ValueError, match="no closed form of 'dance'"):
        form("dance", 2, 1)


def one(function, x, axes=None, **options):
    made = jaxcomm.plan(axes or {"i": 8}, function, x, **options)
    (row,) = made.calls
    return row


def test_a_large_sum_reaches_the_links_rate():
    machine = jaxcomm.Machine.named("h200")
    row = one(lambda x: jaxcomm.psum(x, "i"), shape(1 << 30), machine=machine)
    assert 0.9 <= row.cost.bus_rate / machine.bytes_per_second <= 1
    # A hundred nodes of eight: a ring leaves each by all of its network cards.
    many = one(
        lambda x: jaxcomm.psum(x, ("d", "i")),
        shape(1 << 30),
        axes={"d": 100, "i": 8},
        machine=machine,
    )
    assert 0.8 <= many.cost.bus_rate / machine.bytes_per_second <= 1
    # A rank in each node: by its own alone.
    apart = one(
        lambda x: jaxcomm.psum(x, "d"),
        shape(1 << 30),
        axes={"d": 100, "i": 8},
        machine=machine,
    )
    assert 0.8 <= apart.cost.bus_rate / machine.network_bytes_per_second <= 1


def test_small_sums_take_nccls_latency():
    """src/graph/tuning.cc: LL's base 6.6 us and 0.6 us a step of NVLink."""
    row = one(
        lambda x: jaxcomm.psum(x, "i"),
        shape(2),
        machine="h100",
        policy=jaxcomm.CommPolicy(one_shot=False),
    )
    assert row.cost.seconds.value == pytest.approx(6.6e-6 + 14 * 0.6e-6, rel=0.01)


def test_time_grows_with_bytes_and_never_falls_below_the_wire():
    machine = jaxcomm.Machine.named("h100")
    for name in ("psum", "all_gather", "ring_shift"):
        times = []
        for size in (1 << k for k in range(8, 28, 2)):
            row = one(lambda x, of=name: getattr(jaxcomm, of)(x, "i"), shape(size))
            times.append(row.cost.seconds.value)
            assert row.cost.sent / times[-1] <= machine.bytes_per_second
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("function", "size", "axes", "policy", "carrier"),
    [
        ("psum", 64, {"i": 2}, {}, "one_shot"),
        ("psum", 1 << 18, {"i": 2}, {}, "one_shot"),
        ("psum", (1 << 18) + 1, {"i": 2}, {}, "nccl"),
        ("psum", 1 << 14, {"i": 8}, {}, "one_shot"),
        ("psum", (1 << 14) + 1, {"i": 8}, {}, "nccl"),
        ("psum", 64, {"i": 9}, {}, "nccl"),
        ("psum", 64, {"i": 2}, {"one_shot": False}, "nccl"),
        ("psum", 64, {"i": 2}, {"command_buffers": True}, "nccl"),
        ("pmax", 64, {"i": 2}, {}, "nccl"),
        ("ring_shift", 8 << 20, {"i": 2}, {}, "copy"),
        ("ring_shift", (8 << 20) - 1, {"i": 2}, {}, "nccl"),
        ("ring_shift", 8 << 20, {"i": 2}, {"copy_engines": False}, "nccl"),
        ("ring_shift", 8 << 20, {"i": 16}, {}, "nccl"),
        ("all_gather", 8 << 20, {"i": 2}, {}, "copy"),
    ],
)
def test_the_engine_is_that_of_the_backend(function, size, axes, policy, carrier):
    row = one(
        lambda x: getattr(jaxcomm, function)(x, "i"),
        shape(size),
        axes=axes,
        policy=jaxcomm.CommPolicy(**policy),
    )
    assert row.cost.carrier == carrier, row.cost.reason


def test_copies_need_one_process():
    row = one(
        lambda x: jaxcomm.ring_shift(x, "i"), shape(8 << 20), devices_per_process=1
    )
    assert (row.cost.carrier, row.cost.reason) == (
        "nccl",
        "not all ranks are of one process whose GPUs reach each other's memory",
    )


def calibrated(*samples):
    return dataclasses.replace(jaxcomm.Machine.named("cpu"), samples=samples, cores=2)


def test_a_calibration_answers_for_what_it_measured():
    machine = calibrated(
        Sample("all_reduce", "memory", 4, 1 << 10, 1e-3),
        Sample("all_reduce", "memory", 4, 1 << 14, 4e-3),
    )

    def seconds(size, ranks=4):
        row = one(
            lambda x: jaxcomm.psum(x, "i"),
            shape(size // 4),
            axes={"i": ranks},
            machine=machine,
        )
        return row.cost.seconds

    assert (seconds(1 << 10).value, seconds(1 << 10).origin) == (1e-3, "m")
    assert seconds(1 << 12).value == pytest.approx(1e-3 + 3e-3 * 3 / 15)
    assert seconds(1 << 12).origin == "m"
    # Beyond, in proportion; below, not at all.
    assert seconds(1 << 15).value == pytest.approx(8e-3)
    assert (seconds(16).value, seconds(16).origin) == (1e-3, "s")
    # Other groups: scaled by the closed form.
    more = seconds(1 << 14, ranks=8)
    assert more.origin == "s"
    assert 4e-3 < more.value <= 8e-3


def test_groups_beyond_the_cores_take_turns():
    machine = calibrated(
        Sample("all_reduce", "memory", 2, 1 << 20, 1e-3),
        Sample("all_reduce", "memory", 2, 1 << 22, 4e-3),
    )
    machine = dataclasses.replace(machine, latency=0)

    def seconds(groups):
        row = one(
            lambda x: jaxcomm.psum(x, "i"),
            shape(1 << 19),
            axes={"d": groups, "i": 2},
            machine=machine,
        )
        return row.cost.seconds.value

    assert seconds(2) == pytest.approx(seconds(1))
    assert seconds(8) == pytest.approx(4 * seconds(1))


def test_a_cpu_group_between_hosts_is_xlas():
    machine = dataclasses.replace(jaxcomm.Machine.named("cpu"), host=4, domain=4)
    row = one(lambda x: jaxcomm.psum(x, "i"), shape(64), machine=machine)
    assert (row.call.backend, row.cost.carrier) == ("xla", "xla")
    assert math.isfinite(row.cost.seconds.value)


def test_arrays_that_are_mapped_anew_are_told_from_others():
    """glibc maps 32 MiB and more each time: no line joins the two."""
    machine = calibrated(
        Sample("permute", "memory", 2, 16 << 20, 1e-3),
        Sample("permute", "memory", 2, 32 << 20, 20e-3),
    )
    for size, seconds in ((24 << 20, 1.5e-3), (64 << 20, 40e-3)):
        row = one(
            lambda x: jaxcomm.ring_shift(x, "i"),
            shape(size // 4),
            axes={"i": 2},
            machine=machine,
        )
        assert row.cost.seconds.value == pytest.approx(seconds)
        assert row.cost.seconds.origin == "s"
