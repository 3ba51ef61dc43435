"""Slices of uneven sizes: values, derivatives, index types and what does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm
from jaxcomm.primitives import nccl_rewrites

SIZE = 4
traced = pytest.mark.host_only(reason="made of exchanges before there is a backend")


def ragged(slices_per_rank, rows, out_rows, seed=0):
    """Return random slices that do not overlap: starts, sizes, offsets, sizes."""
    rng = np.random.default_rng(seed)
    slices = SIZE * slices_per_rank
    send = rng.integers(0, rows // slices + 1, (SIZE, slices))
    send[1, 0] = send[2, :] = 0  # an empty slice, and a rank that sends nothing
    # receive[target, source * slices_per_rank + i]
    by_pair = send.reshape(SIZE, SIZE, slices_per_rank)
    receive = by_pair.transpose(1, 0, 2).reshape(SIZE, slices)
    # One row between what arrives keeps the output's values.
    places = np.cumsum(receive + 1, 1) - receive
    there = places.reshape(SIZE, SIZE, slices_per_rank).transpose(1, 0, 2)
    assert places[:, -1].max() + receive[:, -1].max() <= out_rows
    # An empty slice overlaps nothing, wherever it lies.
    there = np.where(send == 0, out_rows // 2, there.reshape(SIZE, slices))
    indices = np.cumsum(send, 1) - send, send, there, receive
    return [index.astype(np.int32) for index in indices]


def arrived(operand, output, starts, send, offsets, _=None):
    out, (size, slices) = output.copy(), send.shape
    for source, i in np.ndindex(size, slices):
        target, count = i // (slices // size), int(send[source, i])
        begin, place = int(starts[source, i]), int(offsets[source, i])
        out[target, place : place + count] = operand[source, begin : begin + count]
    return out


def exchange(*operands, **options):
    return jaxcomm.ragged_all_to_all(*operands, axis_name="i", **options)


@pytest.fixture
def host_reads(monkeypatch):
    """Over NCCL: as with large operands, the host of each rank reads all numbers."""
    monkeypatch.setattr(nccl_rewrites, "_GATHERED_BYTES", -1)


@pytest.mark.parametrize("slices_per_rank", [1, 3])
def test_slices_land_at_their_offsets(
    stacked, identical, values, mesh, slices_per_rank, default_backend, monkeypatch
):
    indices = ragged(slices_per_rank, 24, 48)
    calls = [
        [*(values(dtype, (SIZE, rows, *tail), rows) for rows in (24, 48)), *indices]
        for dtype, tail in (
            ("float32", (3,)),
            ("int8", ()),
            (jnp.bfloat16, (2, 2)),
            ("float32", (0,)),
        )
    ]
    # Nothing arrives where nothing is sent.
    nothing = [np.zeros_like(index) for index in indices]
    calls.append([calls[0][0][:, :0], calls[0][1], *nothing])

    def program(calls):
        return [exchange(*call) for call in calls]

    for gathers in (True, False):
        if default_backend == "nccl":
            most = nccl_rewrites._GATHERED_BYTES if gathers else -1
            monkeypatch.setattr(nccl_rewrites, "_GATHERED_BYTES", most)
            backend = None
        else:
            backend = "xla" if gathers else None
        with jaxcomm.using(backend=backend):
            found = stacked(mesh, program, calls)
        identical(found, [arrived(*call) for call in calls])


# Between two ranks. In int8, 100 + 28 overflows; 150 and 199 are negative.
NEAR = [[[0, 100]] * 2, [[10, 28]] * 2, [[0, 60], [10, 100]], [[10, 10], [28, 28]]]
FAR = [[[150, 199]] * 2, [[1, 1]] * 2, [[150, 150], [199, 199]], [[1, 1]] * 2]
TYPES = [(name, NEAR) for name in ("int8", "int16", "int64", "uint8", "uint32")]
TYPES += [("uint8", FAR), ("uint64", FAR), (["uint64", *["int64"] * 3], FAR)]


@pytest.mark.parametrize(
    "how",
    ["collective", *(pytest.param(x, marks=traced) for x in ("in xla", "own axis"))],
)
def test_indices_may_be_of_any_integer_type(stacked, mesh_of, how):
    x = np.arange(400, dtype=np.float32).reshape(2, 200)
    indices = [
        [np.array(x, d) for x, d in zip(rows, np.broadcast_to(dtype, 4), strict=True)]
        for dtype, rows in TYPES
    ]
    weights = x % 7

    def program(x, out, weights, indices):
        def both(index):
            result, transpose = jax.vjp(lambda x, out: exchange(x, out, *index), x, out)
            return result, transpose(weights)

        return [both(index) for index in indices]

    given = x, -np.ones_like(x), weights, [list(index) for index in indices]
    backend = "xla" if how == "in xla" else None
    with jax.enable_x64(True), jaxcomm.using(backend=backend):
        if how == "own axis":
            found = jax.jit(jax.vmap(program, axis_name="i"))(*given)
        else:
            found = stacked(mesh_of((2,), ("i",)), program, *given)
    for (result, (of_x, of_out)), index in zip(found, indices, strict=True):
        np.testing.assert_array_equal(result, arrived(x, -np.ones_like(x), *index))
        # It is linear. These sums of integers are exact.
        assert (of_x * x - of_out).sum() == (result * weights).sum()


@traced
def test_gradients_of_rows_in_several_slices_are_refused(stacked, mesh_of):
    """They come back one by one, and would overwrite each other."""
    x, out = np.ones((2, 3), np.float32), np.zeros((2, 4), np.float32)
    # Of rank 0, rows 0 and 1 go to both ranks. Of rank 1, row 1 alone does.
    starts, sizes = np.int32([[0, 0], [0, 1]]), np.full((2, 2), 2, np.int32)
    offsets = np.int32([[0, 0], [2, 2]])

    def gradient(x, *rest):
        return jax.grad(lambda x: exchange(x, *rest).sum())(x)

    given = mesh_of((2,), ("i",)), gradient, x, out, starts, sizes, offsets, sizes
    shared = (
        "slice 0 of rank 0 .* and slice 0 of rank 1 .* output of rank 0, from row 0"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{shared}.*send copies"):
        jax.block_until_ready(stacked(*given))
    # Where the host does not see them, all of that rank's.
    with jaxcomm.using(backend="xla"):
        assert np.isnan(stacked(*given)).all()


@traced
def test_vmap_over_data_exchanges_every_example(stacked, identical, mesh, values):
    # Four examples of 40 rows: the last one's are beyond int8.
    batches = [ragged(2, 24, 40, seed) for seed in range(4)]
    indices = [np.stack([b[i] for b in batches], 1).astype(np.int8) for i in range(4)]
    operand, output = values("float32", (SIZE, 4, 24)), values("float32", (SIZE, 4, 40))
    rows = np.arange(24, dtype=np.float32)

    def program(*operands):
        def beside_a_batch(batched):
            return batched, exchange(*(each[0] for each in operands))

        def linear(x):
            return exchange(x, 0 * operands[1][0], *(each[0] for each in operands[2:]))

        alone = jax.vmap(beside_a_batch, out_axes=(0, None))(jnp.arange(3.0))[1]
        # Linear: its Jacobian, by tangents equal on all ranks, times an operand equal
        # on all ranks is its result.
        return jax.vmap(exchange)(*operands), alone, jax.jacfwd(linear)(rows) @ rows

    found, alone, tangents = map(
        np.asarray, stacked(mesh, program, operand, output, *indices)
    )
    for b, of_one in enumerate(batches):
        identical(found[:, b], arrived(operand[:, b], output[:, b], *of_one))
    identical(alone, found[:, 0])
    nothing = np.zeros((SIZE, 40), np.float32)
    identical(tangents, arrived(np.tile(rows, (SIZE, 1)), nothing, *batches[0]))


LAST = 2**63 - 1


@pytest.mark.parametrize(
    ("which", "dtype", "value", "message"),
    [
        # Of the first slice of rank 0: which index, its type, its value, and the error.
        (3, "int32", 2, "rank 0 sends 1 rows to rank 0, which expects 2"),
        (0, "int32", 90, "takes 1 rows from row 90 on of an operand with 4 rows"),
        (0, "uint32", 4, "row 4 on of an operand with 4 rows"),
        (0, "uint32", 3_000_000_000, "row 3000000000 on of an operand"),
        # Its sum with the number of rows is negative, in 64 bits.
        (0, "int64", LAST, f"row {LAST} on of an operand"),
        (2, "int32", -1, "to row -1 on of an output with 4 rows"),
        (2, "int32", 4, "to row 4 on of an output with 4 rows"),
        (2, "int64", LAST, f"row {LAST} on of an output"),
        (
            2,
            "int32",
            1,
            r"slice 0 of rank 0 \(1 rows\) and slice 0 of rank 1 \(1 rows\) "
            "overlap in the output of rank 0, from row 1 on",
        ),
    ],
)
def test_what_does_not_fit_raises_and_names_the_slice(
    stacked, mesh, host_reads, which, dtype, value, message
):
    ones = np.ones((SIZE, SIZE), dtype)
    base = np.tile(np.arange(SIZE, dtype=dtype), (SIZE, 1))
    good = [base, ones, base.T, ones]
    bad = [index.copy() for index in good]
    bad[which][0, 0] = value
    x = np.arange(SIZE * 4, dtype=np.float32).reshape(SIZE, 4)
    with jax.enable_x64(True):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"ragged_all_to_all.*{message}"
        ):
            jax.block_until_ready(stacked(mesh, exchange, x, 0 * x, *bad))
        found = stacked(mesh, exchange, x, 0 * x, *good)
    np.testing.assert_array_equal(found, x.T)
    assert [c.stats()["in_flight"] for c in jaxcomm.communicators()] == [0]


@traced
def test_a_refused_exchange_ends_the_program_on_every_device(stacked, mesh_of):
    """Also where groups are right: they would wait for devices that have failed."""
    starts, ones = np.tile(np.int32([0, 1]), (4, 1)), np.ones((4, 2), np.int32)
    places = np.int32([[0, 0], [0, 0], [1, 1], [1, 1]])
    x, mesh = np.zeros((4, 2), np.float32), mesh_of((2, 2), ("i", "j"))

    def program(*operands):
        return jaxcomm.psum(exchange(*operands), "j")

    jax.block_until_ready(stacked(mesh, program, x, x, starts, ones, places, ones))
    places[2, 0] = 5  # in one of the groups along i
    for shard in stacked(
        mesh, program, x, x, starts, ones, places, ones
    ).addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match="to row 5 on of an outp"):
            shard.data.block_until_ready()


def _two_rows_each():
    """Starts, sizes, offsets, sizes: to and from rows 0 and 2 of four, on two ranks."""
    starts = np.tile(np.int32([0, 2]), (2, 1))
    return [starts, np.full_like(starts, 2), starts.T.copy(), np.full_like(starts, 2)]


@pytest.mark.parametrize(
    ("which", "offset"), [(0, -1), (0, 3), (2, 4), (2, 2**31 - 1), (2, 1)]
)
def test_under_vmap_no_slice_reaches_into_a_neighbour(
    stacked, mesh_of, host_reads, which, offset
):
    x = np.zeros((2, 3, 4), np.float32)  # three examples of four rows on each rank
    indices = [np.stack([index] * 3, 1) for index in _two_rows_each()]
    call, mesh = jax.vmap(exchange), mesh_of((2,), ("i",))
    stacked(mesh, call, x, x, *indices)
    indices[which][0, 1, 0] = offset
    message = "overlap in" if offset == 1 else r"row 12 on of an o.*12 rows"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(stacked(mesh, call, x, x, *indices))


@traced
def test_under_vmap_of_the_axis_what_does_not_fit_is_nan():
    x = np.ones((2, 4), np.float32)
    fitting = _two_rows_each()
    call = jax.jit(jax.vmap(exchange, axis_name="i"))
    np.testing.assert_array_equal(call(x, x, *fitting), x)
    for which, value in (
        *((0, 3), (0, -1), (1, -1), (1, 5), (2, 1), (2, 3), (2, 2**31 - 1), (3, 1)),
    ):
        indices = [index.copy() for index in fitting]
        # Of rank 1, to or from rank 0.
        indices[which][(0, 1) if which == 3 else (1, 0)] = value
        found = call(x, x, *indices)
        assert np.isnan(found[0]).all(), (which, value)
        np.testing.assert_array_equal(found[1], x[1])
    assert (call(x.astype(int), x.astype(int), *indices)[0] < 0).all()


def test_gathered_a_rank_computes_what_it_receives_alone(mesh_of, default_backend):
    """A program that does not grow with the ranks: not by what the others receive."""
    # The host's own exchange gathers nothing.
    backend = "xla" if default_backend == "host" else default_backend
    lines = []
    for size in (2, 8):
        call = functools.partial(exchange, backend=backend)
        arrays = [np.zeros((size * rows, 3), np.float32) for rows in (24, 40)]
        indices = [np.zeros(size * size, np.int32)] * 4
        lowered = over(mesh_of((size,), ("i",)), call).lower(*arrays, *indices)
        text = lowered.as_text()
        lines.append(text.splitlines())
        assert f"tensor<{size}x24x3xf32>" in text
        # Nobody needs the others' outputs.
        assert f"tensor<{size}x40x3xf32>" not in text
    assert len(lines[0]) == len(lines[1])
