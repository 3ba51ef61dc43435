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


def test_bytes_are_those_of_nccl_tests():
    """By its doc/PERFORMANCE.md. Size is that of the larger buffer."""
    for n in (2, 3, 64):
        for names, share in (
            ("all_reduce", 2 * (n - 1) / n),
            ("reduce_scatter scatter all_to_all", (n - 1) / n),
            ("all_gather gather", n - 1),
            ("broadcast reduce permute", 1),
        ):
            for name in names.split():
                found = form(name, n, 1200 * n).bytes
                assert found == pytest.approx(1200 * n * share)


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


def test_the_slowest_link_and_the_slowest_group_count():
    fast = dataclasses.replace(MACHINE, network_bytes_per_second=1e12)
    # 28 MB to seven peers, three of them within.
    found = one("all_to_all", 8_000_000, 8, machine=fast).seconds.value
    assert found * 1e6 == pytest.approx(50 + 6 * 2.7 + 120)
    # LL128's ring of 17.5 MB.
    found = one("psum", 2_500_000, 8, machine=fast).seconds.value
    assert found * 1e6 == pytest.approx(14 + 12 * 1.9 + 2 * 4 + 175 / 0.92)
    # Of three groups of two the middle one, the slowest, lies in two domains of three.
    odd = dataclasses.replace(MACHINE, domain=3, host=3)
    found = one("ring_shift", 250_000, axes={"d": 3, "i": 2}, machine=odd)
    assert found.seconds.value * 1e6 == pytest.approx(50 + 100)


def test_time_of_cpus_is_that_of_memory_or_of_the_network():
    # Four ranks read 1 MB each and write as much. Eight on two hosts: over a network of
    # 10 GB/s in 2 * 7 steps, 2 * 7/8 of the bytes.
    four, eight = (one("psum", 250_000, ranks, machine=CPU) for ranks in (4, 8))
    assert four.seconds.value * 1e6 == pytest.approx(30 + 8e6 / 40e3)
    assert eight.seconds.value * 1e6 == pytest.approx(14 * 50 + 1.75e6 / 10e3)
    assert (four.carrier, eight.carrier) == ("memory", "xla")


def test_the_engine_is_that_of_the_policy_and_the_processes():
    """Of the operation and its size: see tests/nccl/test_planning.py."""
    for name, words, ranks, policy, carrier in (
        ("psum", 64, 2, {}, "one_shot"),
        ("psum", 64, 9, {}, "nccl"),
        ("psum", 64, 2, {"one_shot": False}, "nccl"),
        ("psum", 64, 2, {"command_buffers": True}, "nccl"),
        ("ring_shift", 8 << 20, 2, {}, "copy"),
        ("ring_shift", 8 << 20, 2, {"copy_engines": False}, "nccl"),
    ):
        found = one(name, words, ranks, machine="h200", policy=policy)
        assert found.carrier == carrier, found.reason
    found = one("ring_shift", 8 << 20, machine="h200", devices_per_process=1)
    assert found.carrier == "nccl"
    assert found.reason.startswith("not all ranks are of one process whose GPUs")


def calibrated(*samples):
    machine = dataclasses.replace(CPU, host=64, domain=64, cores=2)
    return dataclasses.replace(machine, samples=samples)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "seconds", "origin"),
    [
        ("psum", 1 << 10, 4, 1e-3, "m"),
        ("psum", 1 << 12, 4, 1e-3 + 3e-3 * 3 / 15, "m"),
        # Beyond what was measured in proportion; below it not at all.
        ("psum", 1 << 15, 4, 8e-3, "s"),
        ("psum", 16, 4, 1e-3, "s"),
        # Other groups by the formula: twice the ranks read and write twice the bytes.
        ("psum", 1 << 14, 8, 4e-3 * (30 + 262144 / 4e4) / (30 + 131072 / 4e4), "s"),
        # glibc maps 32 MiB and more anew each time: no line joins them with less.
        ("ring_shift", 24 << 20, 2, 1.5e-3, "s"),
        ("ring_shift", 64 << 20, 2, 40e-3, "s"),
    ],
)
def test_a_calibration_answers_for_what_it_measured(name, size, ranks, seconds, origin):
    machine = calibrated(
        Sample("all_reduce", "memory", 4, 1 << 10, 1e-3),
        Sample("all_reduce", "memory", 4, 1 << 14, 4e-3),
        Sample("all_reduce", "memory", 2, 1 << 14, 9.0),
        Sample("all_gather", "memory", 4, 1 << 14, 9.0),
        Sample("permute", "memory", 2, 16 << 20, 1e-3),
        Sample("permute", "memory", 2, 32 << 20, 20e-3),
    )
    found = one(name, size // 4, ranks, machine=machine).seconds
    assert (found.value, found.origin) == (pytest.approx(seconds), origin)


def test_groups_beyond_the_cores_take_turns():
    machine = calibrated(Sample("all_reduce", "memory", 2, 1 << 21, 1e-3))
    machine = dataclasses.replace(machine, latency=0)
    # On two cores.
    for groups, turns in ((1, 1), (2, 1), (8, 4)):
        axes = {"d": groups, "i": 2}
        found = one("psum", 1 << 19, machine=machine, axes=axes)
        assert found.seconds.value == pytest.approx(turns * 1e-3)
