"""Costs are those of published formulas, worked out by hand.

Numbers of NCCL are those of its src/graph/tuning.cc, in microseconds: an algorithm's
base, and what each step adds over NVLink and over a network.
"""

import dataclasses

import jax
import pytest

import jaxcomm
from jaxcomm.machine import Sample
from jaxcomm.planning.closed_forms import form

# In round numbers: 100 GB/s within four GPUs, 10 GB/s between.
MACHINE = jaxcomm.Machine(
    *(1e12, 100e9, 10e-6, "round numbers"),
    domain=4,
    host=4,
    network_bytes_per_second=10e9,
    network_latency=50e-6,
)
CPU = dataclasses.replace(
    MACHINE, platform="cpu", latency=30e-6, memory_bytes_per_second=40e9
)


OPTIONS = {
    "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
    "psum_scatter": {"tiled": True},
}


def one(name, words, ranks=4, machine=MACHINE, axes=None, policy=None, **options):
    """Return the cost of a collective of so many float32."""
    made = jaxcomm.plan(
        axes or {"i": ranks},
        lambda x: getattr(jaxcomm, name)(x, "i", **OPTIONS.get(name, {})),
        jax.ShapeDtypeStruct((words,), "float32"),
        machine=machine,
        policy=jaxcomm.CommPolicy(**(policy or {})),
        **options,
    )
    (row,) = made.calls
    return row.cost


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


@pytest.mark.parametrize("name", BUS)
def test_bytes_are_those_of_nccl_tests(name):
    for ranks in (2, 3, 64):
        operand = 1200 * ranks
        larger = operand * (ranks if name in ("all_gather", "gather") else 1)
        found = form(name, ranks, operand).bytes
        assert found == pytest.approx(larger * BUS[name](ranks))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # Rings and pairwise exchange: Thakur et al., IJHPCA 19(1), 2005, section 4.
        ("all_gather", {2: 1, 5: 4, 9: 8}),
        ("all_reduce", {2: 2, 5: 8, 9: 16}),
        ("reduce_scatter", {2: 1, 5: 4, 9: 8}),
        ("all_to_all", {2: 1, 5: 4, 9: 8}),
        ("permute", {2: 1, 5: 1, 9: 1}),
        # Distances 1, 2, 4 ...: Hillis and Steele, CACM 29(12), 1986, for scans;
        # Hensgen, Finkel and Manber, IJPP 17(1), 1988, for barriers.
        ("scan", {2: 1, 5: 3, 8: 3, 9: 4}),
        ("barrier", {2: 1, 5: 3, 8: 3, 9: 4}),
    ],
)
def test_steps_are_those_of_the_papers(name, steps):
    assert {ranks: form(name, ranks, 1).steps for ranks in steps} == steps


def test_what_has_no_form_is_refused():
    with pytest.raises(ValueError, match="no closed form of 'dance'"):
        form("dance", 2, 1)


@pytest.mark.parametrize(
    ("name", "ranks", "words", "domain", "microseconds"),
    [
        # LL's ring: half the words are flags. 6 steps, 1.5 times the bytes.
        ("psum", 4, 250, 4, 6.6 + 6 * 0.6 + 0.03),
        # The simple ring at full rate, 15 MB to send.
        ("psum", 4, 2_500_000, 4, 8.4 + 6 * 3.4 + 150),
        # LL128's lines are data to 15/16, for NCCL 0.92: 4.2 MB to send.
        ("all_gather", 8, 150_000, 8, 14 + 7 * 1.9 + 42 / 0.92),
        # Two domains: a ring crosses twice in each round. Four cards: 40 GB/s.
        ("psum", 8, 250, 4, 6.6 + 12 * 0.6 + 2 * 2.7 + 1.75 / 20),
        # Eight: the tree's height is less. 32 ranks send 31/16 of the bytes.
        ("psum", 32, 256, 4, 6.8 + 6 * 0.6 + 6 * 5.0 + 1.984 / (20 * 0.92)),
        ("psum", 32, 1_000_000, 4, 14 + 6 * 1.25 + 6 * 8.5 + 193.75 / 0.92 / 0.92),
        # One round crosses once.
        ("psum_scatter", 8, 8000, 4, 6.6 + 6 * 0.6 + 2.7 + 28 / 20),
        # Pairs: of seven peers four are over the network, and 20 MB of 35.
        ("all_to_all", 8, 10_000_000, 4, 50 + 6 * 2.7 + 2000),
        # Of domains of three and one: one peer of three.
        ("all_to_all", 4, 1_000_000, 3, 50 + 2 * 2.7 + 100),
        ("all_to_all", 4, 100, 4, 10 + 2 * 0.6 + 0.003),
        # A neighbor may be in another domain.
        ("ring_shift", 8, 250_000, 4, 50 + 100),
        ("ring_shift", 4, 250_000, 4, 10 + 10),
    ],
)
def test_time_is_that_of_nccls_tuning(name, ranks, words, domain, microseconds):
    policy = {"one_shot": False, "copy_engines": False}
    machine = dataclasses.replace(MACHINE, domain=domain, host=domain)
    found = one(name, words, ranks, machine=machine, policy=policy)
    assert found.carrier == "nccl"
    assert found.seconds.value * 1e6 == pytest.approx(microseconds, rel=1e-3)
    assert found.seconds.origin == "f"
    assert found.bus_rate == pytest.approx(found.sent / found.seconds.value)


def test_slow_links_within_a_domain_hide_a_fast_network():
    fast = dataclasses.replace(MACHINE, network_bytes_per_second=1e12)
    # 28 MB to seven peers, three of them within.
    found = one("all_to_all", 8_000_000, 8, machine=fast).seconds.value
    assert found * 1e6 == pytest.approx(50 + 6 * 2.7 + 120)
    # LL128's ring of 17.5 MB.
    found = one("psum", 2_500_000, 8, machine=fast).seconds.value
    assert found * 1e6 == pytest.approx(14 + 12 * 1.9 + 2 * 4 + 175 / 0.92)


def test_the_slowest_group_counts():
    """Of three groups of two the middle one lies in two domains of three."""
    machine = dataclasses.replace(MACHINE, domain=3, host=3)
    found = one("ring_shift", 250_000, axes={"d": 3, "i": 2}, machine=machine)
    assert found.seconds.value * 1e6 == pytest.approx(50 + 100)


@pytest.mark.parametrize(
    ("ranks", "host", "microseconds"),
    [
        # Four ranks read 1 MB each and write as much.
        (4, 4, 30 + 8e6 / 40e3),
        # Over a network of 10 GB/s: 2 * 7 steps, 2 * 7/8 of the bytes.
        (8, 4, 14 * 50 + 1.75e6 / 10e3),
    ],
)
def test_time_of_cpus_is_that_of_memory_or_of_the_network(ranks, host, microseconds):
    machine = dataclasses.replace(CPU, host=host)
    found = one("psum", 250_000, ranks, machine=machine)
    assert found.seconds.value * 1e6 == pytest.approx(microseconds)
    assert found.carrier == ("memory" if ranks == host else "xla")


@pytest.mark.parametrize(
    ("name", "words", "ranks", "policy", "carrier"),
    [
        ("psum", 1 << 18, 2, {}, "one_shot"),
        ("psum", (1 << 18) + 1, 2, {}, "nccl"),
        ("psum", 64, 9, {}, "nccl"),
        ("psum", 64, 2, {"one_shot": False}, "nccl"),
        ("psum", 64, 2, {"command_buffers": True}, "nccl"),
        ("pmax", 64, 2, {}, "nccl"),
        ("ring_shift", 8 << 20, 2, {}, "copy"),
        ("ring_shift", (8 << 20) - 1, 2, {}, "nccl"),
        ("ring_shift", 8 << 20, 2, {"copy_engines": False}, "nccl"),
        ("all_gather", 8 << 20, 2, {}, "copy"),
    ],
)
def test_the_engine_is_that_of_the_backend(name, words, ranks, policy, carrier):
    found = one(name, words, ranks, machine="h200", policy=policy)
    assert found.carrier == carrier, found.reason


def test_copies_need_one_process():
    found = one("ring_shift", 8 << 20, machine="h200", devices_per_process=1)
    assert (found.carrier, found.reason) == (
        "nccl",
        "not all ranks are of one process whose GPUs reach each other's memory",
    )


def calibrated(*samples):
    machine = dataclasses.replace(CPU, host=64, domain=64, cores=2)
    return dataclasses.replace(machine, samples=samples)


@pytest.mark.parametrize(
    ("size", "ranks", "seconds", "origin"),
    [
        (1 << 10, 4, 1e-3, "m"),
        (1 << 12, 4, 1e-3 + 3e-3 * 3 / 15, "m"),
        # Beyond what was measured in proportion; below it not at all.
        (1 << 15, 4, 8e-3, "s"),
        (16, 4, 1e-3, "s"),
        # Other groups by the formula: twice the ranks read and write twice the bytes.
        (1 << 14, 8, 4e-3 * (30e-6 + 262144 / 40e9) / (30e-6 + 131072 / 40e9), "s"),
    ],
)
def test_a_calibration_answers_for_what_it_measured(size, ranks, seconds, origin):
    machine = calibrated(
        Sample("all_reduce", "memory", 4, 1 << 10, 1e-3),
        Sample("all_reduce", "memory", 4, 1 << 14, 4e-3),
        Sample("all_reduce", "memory", 2, 1 << 14, 9.0),
        Sample("all_gather", "memory", 4, 1 << 14, 9.0),
    )
    found = one("psum", size // 4, ranks, machine=machine).seconds
    assert found.value == pytest.approx(seconds)
    assert found.origin == origin


def test_groups_beyond_the_cores_take_turns():
    machine = calibrated(Sample("all_reduce", "memory", 2, 1 << 21, 1e-3))
    machine = dataclasses.replace(machine, latency=0)
    # On two cores.
    for groups, turns in ((1, 1), (2, 1), (8, 4)):
        axes = {"d": groups, "i": 2}
        found = one("psum", 1 << 19, machine=machine, axes=axes)
        assert found.seconds.value == pytest.approx(turns * 1e-3)


def test_arrays_that_are_mapped_anew_are_told_from_others():
    """glibc maps 32 MiB and more each time: no line joins the two."""
    machine = calibrated(
        Sample("permute", "memory", 2, 16 << 20, 1e-3),
        Sample("permute", "memory", 2, 32 << 20, 20e-3),
    )
    for size, seconds in ((24 << 20, 1.5e-3), (64 << 20, 40e-3)):
        found = one("ring_shift", size // 4, 2, machine=machine).seconds
        assert found.value == pytest.approx(seconds)
        assert found.origin == "s"
