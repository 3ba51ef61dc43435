"""Bytes are those of published formulas, and sizes those of the extension."""

import jax
import pytest

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.planning import communicators
from jaxcomm.planning.calls import sent_bytes

CPU = jaxcomm.Machine.named("cpu")


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


def test_the_transport_is_that_of_the_backend_and_of_the_processes():
    def transport(machine=CPU, **options):
        x = jax.ShapeDtypeStruct((256,), "float32")
        (row,) = jaxcomm.plan(
            {"d": 4, "i": 2},
            lambda x: jaxcomm.ring_shift(x, "i"),
            x,
            machine=machine,
            **options,
        ).calls
        return row.transport

    assert transport() == "memory"
    assert transport(devices_per_process=1) == "shared memory"
    assert transport("h100") == "nccl"
    assert transport(backend="xla") == "xla"


def test_sizes_are_those_of_the_extension():
    """A plan needs no extension: jaxcomm.planning has them once more."""
    assert communicators.MOST_SHARING_PROCESSES == _ffi.MOST_SHARING_PROCESSES
    for count in range(1, _ffi.MOST_SHARING_PROCESSES + 1):
        shared = communicators.shared_memory_bytes(count)
        assert shared == _ffi.shared_memory_bytes(count)
        assert communicators.inbox_bytes(count) == _ffi.one_shot_bytes(count)
