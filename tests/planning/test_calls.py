"""Bytes are those of published formulas, and sizes those of the extension."""

import catalogue
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


# What the busiest of four ranks sends, in operands.
SENT = {
    "psum pmean pmax pmin pprod": 2 * 3 / 4,
    "psum_scatter all_to_all pswapaxes pscatter ragged_all_to_all": 3 / 4,
    "all_gather pgather pscan": 3,
    "ppermute pshuffle ring_shift pbroadcast preduce": 1,
    "pbarrier pcast": 0,
}


def test_every_collective_is_planned_as_what_it_sends():
    """Of several operands those that travel: not offsets, nor what is written into."""
    shares = {name: share for names, share in SENT.items() for name in names.split()}
    assert shares.keys() == catalogue.FUNCTIONS.keys()
    x, choice = jax.ShapeDtypeStruct((4, 24), "float32"), catalogue.fixed(4)
    for name, case in catalogue.FUNCTIONS.items():
        for lib in (jaxcomm, jax.lax):
            if lib is jax.lax and not case.twin and name != "ragged_all_to_all":
                continue
            if name == "pcast":
                continue

            def program(x, case=case, lib=lib):
                return case(lib, x, "d", choice)

            made = jaxcomm.plan({"d": 4}, program, x, machine=CPU)
            sent = sum(row.times * row.sent_bytes for row in made.calls)
            assert sent == pytest.approx(shares[name] * 4 * 24 * 4), (lib, name)


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
