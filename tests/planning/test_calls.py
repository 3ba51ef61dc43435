"""Bytes are those of published formulas, and times those that were measured."""

import dataclasses

import jax
import pytest

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.machine import Sample
from jaxcomm.planning import extension_sizes
from jaxcomm.planning.closed_forms import sent_bytes

CPU = jaxcomm.Machine.named("cpu")
PAIRS = dataclasses.replace(CPU, platform="gpu", domain=4, host=4)


def one(name, size, axes, machine, **options):
    """Return the row of a collective over "i", of an operand of so many bytes."""
    x = jax.ShapeDtypeStruct((size // 4,), "float32")
    made = jaxcomm.plan(
        axes, lambda x: getattr(jaxcomm, name)(x, "i"), x, machine=machine, **options
    )
    (row,) = made.calls
    if row.seconds is None:
        assert made.step_seconds is row.bus_rate is None
        assert "one takes" not in str(made)
    else:
        assert made.step_seconds == row.seconds
        assert row.bus_rate == row.sent_bytes / row.seconds
        assert "one takes" in str(made)
    return row


def test_bytes_are_those_of_nccl_tests():
    """By its doc/PERFORMANCE.md. Size is that of the larger buffer."""
    for n in (2, 3, 64):
        for names, share in (
            ("all_reduce", 2 * (n - 1) / n),
            ("reduce_scatter scatter all_to_all", (n - 1) / n),
            ("all_gather gather", n - 1),
            ("broadcast reduce permute", 1),
            ("barrier", 0),
        ):
            for name in names.split():
                found = sent_bytes(name, n, 1200 * n)
                assert found == pytest.approx(1200 * n * share)
    with pytest.raises(ValueError, match="no closed form of 'gossip'"):
        sent_bytes("gossip", 2, 1)


@pytest.mark.parametrize(
    ("name", "size", "axes", "seconds"),
    [
        ("psum", 1 << 10, {"i": 4}, 1e-3),
        # A straight line between two sizes.
        ("psum", 1 << 12, {"d": 2, "i": 4}, 1e-3 + 3e-3 * 3 / 15),
        # Beyond what was measured: bytes, ranks, devices at once, and collectives.
        ("psum", 1 << 15, {"i": 4}, None),
        ("psum", 512, {"i": 4}, None),
        ("psum", 1 << 14, {"i": 8}, None),
        ("psum", 1 << 14, {"d": 4, "i": 4}, None),
        ("pmax", 1 << 14, {"i": 2}, 9.0),
        ("ring_shift", 1 << 14, {"i": 4}, None),
    ],
)
def test_a_time_is_one_that_a_calibration_measured(name, size, axes, seconds):
    samples = (
        Sample("all_reduce", "memory", 4, 8, 1 << 14, 4e-3),
        Sample("all_reduce", "memory", 4, 8, 1 << 10, 1e-3),
        Sample("all_reduce", "memory", 2, 8, 1 << 14, 9.0),
        Sample("all_reduce", "shared memory", 8, 8, 1 << 14, 9.0),
        Sample("all_gather", "memory", 4, 8, 1 << 14, 9.0),
    )
    machine = dataclasses.replace(CPU, samples=samples)
    found = one(name, size, axes, machine).seconds
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_time_is_of_the_links_and_the_transport_that_were_measured():
    def seconds(axes, machine=PAIRS, **options):
        samples = (
            Sample("permute", "nccl", 2, 8, 1 << 10, 1.0),
            Sample("permute", "nccl", 8, 8, 1 << 10, 2.0),
            Sample("permute", "memory", 2, 8, 1 << 10, 3.0),
            Sample("permute", "shared memory", 2, 8, 1 << 10, 4.0),
        )
        machine = dataclasses.replace(machine, samples=samples)
        return one("ring_shift", 1 << 10, axes, machine, **options).seconds

    # Neighbors were measured, and all devices of two domains of four.
    assert seconds({"d": 4, "i": 2}) == 1.0
    assert seconds({"i": 8}) == 2.0
    # Other hosts have devices of their own.
    assert seconds({"d": 8, "i": 2}) == 1.0
    assert seconds({"i": 2, "d": 4}) is None
    # The middle one of three groups of two lies in two domains of three.
    odd = dataclasses.replace(PAIRS, domain=3, host=3)
    assert seconds({"d": 3, "i": 2}, odd) is None
    assert seconds({"d": 4, "i": 2}, CPU) == 3.0
    assert seconds({"d": 4, "i": 2}, CPU, devices_per_process=1) == 4.0
    assert seconds({"d": 4, "i": 2}, backend="xla") is None
    lent = jaxcomm.CommPolicy(source="xla")
    assert seconds({"d": 4, "i": 2}, policy=lent) is None


def test_the_slowest_group_counts():
    samples = (
        Sample("all_reduce", "memory", 2, 8, 1 << 10, 2.0),
        Sample("all_reduce", "memory", 3, 8, 1 << 10, 1.0),
    )
    x = jax.ShapeDtypeStruct((256,), "float32")
    for groups, seconds in (
        ([[0, 1], [2, 3, 4]], 2.0),
        # Nothing is known of four, and a rank alone sends nothing.
        ([[0], [1, 2, 3, 4]], None),
        ([[0, 1], [2], [3], [4]], 2.0),
    ):
        made = jaxcomm.plan(
            {"i": 5},
            lambda x, groups=groups: jaxcomm.psum(x, "i", axis_index_groups=groups),
            x,
            machine=dataclasses.replace(CPU, samples=samples),
        )
        (row,) = made.calls
        assert row.seconds == seconds
        largest = max(map(len, groups))
        assert row.sent_bytes == pytest.approx(2 * 1024 * (largest - 1) / largest)


def test_sizes_are_those_of_the_extension():
    """A plan needs no extension: jaxcomm.planning has them once more."""
    assert extension_sizes.MOST_SHARING_PROCESSES == _ffi.MOST_SHARING_PROCESSES
    for count in range(1, _ffi.MOST_SHARING_PROCESSES + 1):
        shared = extension_sizes.shared_memory_bytes(count)
        assert shared == _ffi.shared_memory_bytes(count)
        assert extension_sizes.inbox_bytes(count) == _ffi.one_shot_bytes(count)
