"""Sizes at which the transport changes its ways, and one element more."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# As in ffi/backends/host: up to here operands lie beside the counters,
INLINE = 4096
# from here on all-reduces of three processes and more go in two phases,
TWO_PHASE = 32 << 10
# one chunk of a stream,
SLOT = 128 << 10
# and as many of them as may be on their way.
WINDOWS = (4 * SLOT, 8 * SLOT)
# Where two ranks of a process or two processes share what is limited.
HALVES = (INLINE // 2, SLOT // 2)


def counts(dtype, most):
    """Numbers of elements: none, one, odd, each edge up to a size and one more."""
    width = np.dtype(dtype).itemsize
    edges = [
        edge // width + near
        for edge in (*HALVES, INLINE, TWO_PHASE, SLOT, *WINDOWS)
        if edge <= most
        for near in (0, 1)
    ]
    return [0, 1, 7, *edges, 3 * most // width + 5]


def operands(here, size, dtype, most, *rows):
    return [
        here.values(jnp.dtype(dtype), (size, *rows, count), count)
        for count in counts(dtype, most)
    ] + ([here.values(jnp.dtype(dtype), (size,), 3)] if not rows else [])


def every_size(here, mesh, most):
    size, model = mesh.size, here.model
    octets = operands(here, size, "uint8", most)
    halves = operands(here, size, "bfloat16", most)
    singles = operands(here, size, "float32", most)
    rows = operands(here, size, "int16", most // 8, size)
    ring = model.permute(lambda n: [(r, (r + 1) % n) for r in range(n)])
    to_last = model.only_on(size - 1, model.all_gather())
    cases = {
        "psum": (jaxcomm.psum, (), model.all_reduce("sum"), singles),
        "psum bf16": (jaxcomm.psum, (), model.all_reduce("sum"), halves),
        "preduce": (jaxcomm.preduce, (1,), model.only_on(1, model.all_reduce("sum")),
                    singles),
        "pscan": (jaxcomm.pscan, (), model.scan(), halves),
        "ring_shift": (jaxcomm.ring_shift, (), ring, octets),
        "pbroadcast": (jaxcomm.pbroadcast, (1,), model.broadcast(1), octets),
        "all_gather": (jaxcomm.all_gather, (), model.all_gather(), octets[:-2]),
        "pgather": (jaxcomm.pgather, (size - 1,), to_last, octets[:-2]),
        "psum_scatter": (jaxcomm.psum_scatter, (), model.reduce_scatter(), rows),
        "all_to_all": (jaxcomm.all_to_all, (0, 0), model.all_to_all(0, 0), rows),
        "pscatter": (jaxcomm.pscatter, (1,), model.scatter(1), rows),
    }  # fmt: skip

    def program(operands):
        # Each array in a call of its own, and all in one: its leaves share what is
        # limited.
        return {
            name: (
                [call(x, "i", *more) for x in operands[name]],
                call(operands[name], "i", *more),
            )
            for name, (call, more, *_) in cases.items()
        }

    found = here.run(mesh, program, {name: case[3] for name, case in cases.items()})
    for name, (*_, group_model, arrays) in cases.items():
        for *results, array in zip(*found[name], arrays, strict=True):
            expected = here.by_group(mesh, ("i",), group_model, array)
            for result in results:
                text = f"{name}, {array.nbytes // size} B"
                here.identical(mesh, result, expected, text)


@pytest.mark.parametrize("at", [(2, 2), (3, 1)])
def test_no_size_is_special(team, at):
    team.call(every_size, at, most=WINDOWS[1] if at[1] == 1 else SLOT)
