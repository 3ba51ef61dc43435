"""Slices of uneven sizes between the devices of several processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def ragged(size, rows, out_rows, seed):
    """Random slices that do not overlap: starts, send sizes, offsets, receive sizes."""
    rng = np.random.default_rng(seed)
    send = rng.integers(0, rows // size + 1, (size, size)).astype(np.int32)
    send[1, 0] = send[-1, :] = 0  # an empty slice, and a rank that sends nothing
    receive = np.ascontiguousarray(send.T)
    starts = np.cumsum(send, 1) - send
    # One row between what arrives keeps the output's values.
    places = np.cumsum(receive + 1, 1) - receive
    assert places[:, -1].max() + receive[:, -1].max() <= out_rows
    offsets = np.ascontiguousarray(places.T)
    return [x.astype(np.int32) for x in (starts, send, offsets, receive)]


def arrived(operand, output, starts, send, offsets):
    out = output.copy()
    for source, target in np.ndindex(send.shape):
        begin, place = starts[source, target], offsets[source, target]
        count = send[source, target]
        out[target, place : place + count] = operand[source, begin : begin + count]
    return out


def exchanges(here, mesh):
    size = mesh.size
    cases = []
    for seed, (dtype, rows, tail) in enumerate(
        [("float32", 12, ()), ("int8", 24, (3,)), ("bfloat16", 240, (500, 2))]
    ):
        out_rows = size * (rows // size + 2)
        operand = here.values(jnp.dtype(dtype), (size, rows, *tail), seed)
        output = here.values(jnp.dtype(dtype), (size, out_rows, *tail), seed + 9)
        cases.append((operand, output, *ragged(size, rows, out_rows, seed)))

    def program(cases):
        return [jaxcomm.ragged_all_to_all(*case, axis_name="i") for case in cases]

    found = here.run(mesh, program, cases)
    for result, (operand, output, *indices) in zip(found, cases, strict=True):
        here.identical(mesh, result, arrived(operand, output, *indices[:3]))


@pytest.mark.parametrize("at", [(2, 1), (3, 2, -1, ("i",), (0, 2, 4, 1, 3, 5))])
def test_slices_land_at_their_offsets(team, at):
    team.call(exchanges, at)


def sizes_that_do_not_fit(here, mesh):
    size = mesh.size
    ones = np.ones((size, size), np.int32)
    base = np.tile(np.arange(size, dtype=np.int32), (size, 1))
    wrong = ones.copy()
    wrong[3, 0] = 2
    x = np.arange(size * size, dtype=np.float32).reshape(size, size)

    def program(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i")

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), wrong)
    found = here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), ones)
    here.identical(mesh, found, x.T)
    return str(caught.value)


def test_sizes_that_do_not_fit_raise_on_every_process_and_harm_nothing(team):
    texts = team.call(sizes_that_do_not_fit, at=(2, 2))
    for text in texts[:2]:
        assert "ragged_all_to_all" in text
        assert "rank 0 sends 1 rows to rank 3, which expects 2" in text
