import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

SIZE = 4


def _ragged(rng, slices_per_rank, rows, out_rows, index_dtype=np.int32):
    """Random slices that do not overlap, and what numpy says arrives."""
    slices = SIZE * slices_per_rank
    send = rng.integers(0, rows // slices + 1, (SIZE, slices)).astype(index_dtype)
    send[1, 0] = send[2, :] = 0  # an empty slice, and a rank that sends nothing
    starts = np.cumsum(send, 1) - send
    # receive[target, source * slices_per_rank + i]
    by_pair = send.reshape(SIZE, SIZE, slices_per_rank)
    receive = by_pair.transpose(1, 0, 2).reshape(SIZE, slices).astype(index_dtype)
    gap = 1  # rows between what arrives keep the output's values
    places = np.cumsum(receive + gap, 1) - receive
    there = places.reshape(SIZE, SIZE, slices_per_rank).transpose(1, 0, 2)
    offsets = there.reshape(SIZE, slices).astype(index_dtype)
    assert places[:, -1].max() + receive[:, -1].max() <= out_rows
    return starts.astype(index_dtype), send, offsets, receive


def _expected(operand, output, starts, send, offsets, slices_per_rank):
    out = output.copy()
    for source in range(SIZE):
        for i in range(send.shape[1]):
            target, count = i // slices_per_rank, send[source, i]
            begin, place = starts[source, i], offsets[source, i]
            out[target, place : place + count] = operand[source, begin : begin + count]
    return out


def _exchange(backend=None):
    def call(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i", backend=backend)

    return call


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((SIZE,), ("i",))


@pytest.mark.parametrize("slices_per_rank", [1, 3])
def test_slices_land_at_their_offsets(
    stacked, identical, values, mesh, slices_per_rank
):
    rng = np.random.default_rng(0)
    rows, out_rows = 24, 48
    indices = _ragged(rng, slices_per_rank, rows, out_rows)
    programs = []
    for dtype, tail in (("float32", (3,)), ("int8", ()), ("bfloat16", (2, 2))):
        operand = values(jnp.dtype(dtype), (SIZE, rows, *tail), 1)
        output = values(jnp.dtype(dtype), (SIZE, out_rows, *tail), 2)
        programs.append((operand, output))

    def program(backend):
        return lambda pairs, indices: [
            _exchange(backend)(*pair, *indices) for pair in pairs
        ]

    for backend in ("host", "xla"):
        found = stacked(mesh, program(backend), programs, indices)
        for result, (operand, output) in zip(found, programs, strict=True):
            starts, send, offsets, _ = indices
            wanted = _expected(operand, output, starts, send, offsets, slices_per_rank)
            identical(result, wanted, backend)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"]
)
def test_indices_may_be_any_integers(stacked, identical, mesh, dtype):
    rng = np.random.default_rng(3)
    starts, send, offsets, receive = _ragged(rng, 1, 12, 24, np.dtype(dtype))
    operand = np.arange(SIZE * 12, dtype=np.float32).reshape(SIZE, 12)
    output = -np.ones((SIZE, 24), np.float32)
    is_64 = dtype.endswith("64")
    with jax.enable_x64(True) if is_64 else contextlib.nullcontext():
        found = stacked(
            mesh, _exchange(), operand, output, starts, send, offsets, receive
        )
    identical(found, _expected(operand, output, starts, send, offsets, 1))


def test_nothing_arrives_where_nothing_is_sent(stacked, identical, mesh):
    zeros = np.zeros((SIZE, SIZE), np.int32)
    operand = np.ones((SIZE, 0, 3), np.float32)
    output = np.arange(SIZE * 6.0, dtype=np.float32).reshape(SIZE, 2, 3)
    found = stacked(mesh, _exchange(), operand, output, zeros, zeros, zeros, zeros)
    identical(found, output)


def test_the_gradient_is_that_of_a_gather_and_scatter(stacked, near, mesh):
    rng = np.random.default_rng(5)
    starts, send, offsets, receive = _ragged(rng, 2, 24, 40)
    operand = rng.standard_normal((SIZE, 24, 2)).astype(np.float32)
    output = rng.standard_normal((SIZE, 40, 2)).astype(np.float32)
    weights = rng.standard_normal((SIZE, 40, 2)).astype(np.float32)

    def program(operand, output, weights, *indices):
        def loss(operand, output):
            return (_exchange()(operand, output, *indices) ** 2 * weights).sum()

        return jax.grad(loss, (0, 1))(operand, output)

    found = stacked(
        mesh, program, operand, output, weights, starts, send, offsets, receive
    )

    # The same on one device: numpy's exchange as an index map, differentiated by hand.
    rows = np.arange(operand.size, dtype=np.int64).reshape(operand.shape)
    empty = np.full(output.shape, -1)
    where = _expected(rows, empty, starts, send, offsets, 2)
    result = np.where(where >= 0, operand.ravel()[where], output)
    upstream = 2 * result * weights
    operand_grad = np.zeros(operand.size)
    np.add.at(operand_grad, where[where >= 0], upstream[where >= 0])
    expected = (
        operand_grad.reshape(operand.shape).astype(np.float32),
        np.where(where >= 0, 0, upstream).astype(np.float32),
    )
    near(found, expected, 1e-6)  # the same three float32 products


def test_vmap_over_data_exchanges_every_example(stacked, identical, mesh):
    rng = np.random.default_rng(6)
    batches = [_ragged(np.random.default_rng(seed), 2, 24, 40) for seed in range(3)]
    indices = [np.stack([b[i] for b in batches], 1) for i in range(4)]
    operand = rng.standard_normal((SIZE, 3, 24)).astype(np.float32)
    output = rng.standard_normal((SIZE, 3, 40)).astype(np.float32)
    found = stacked(mesh, jax.vmap(_exchange()), operand, output, *indices)
    for b, (starts, send, offsets, _) in enumerate(batches):
        wanted = _expected(operand[:, b], output[:, b], starts, send, offsets, 2)
        identical(np.asarray(found)[:, b], wanted)


@pytest.mark.host_only(reason="batched before there is a backend, and long")
def test_what_is_not_batched_stays_so(stacked, identical, mesh):
    rng = np.random.default_rng(7)
    starts, send, offsets, receive = _ragged(rng, 1, 24, 40)
    # The same on all ranks, as are the tangents of jacfwd.
    operand = np.tile(rng.standard_normal(24).astype(np.float32), (SIZE, 1))
    output = np.zeros((SIZE, 40), np.float32)

    def beside_a_batch(*operands):
        def one(batched):
            return batched, _exchange()(*operands)

        return jax.vmap(one, out_axes=(0, None))(jnp.arange(3.0))[1]

    def tangents(operand, *rest):
        # The exchange is linear: its Jacobian times the operand is its result.
        return jax.jacfwd(lambda x: _exchange()(x, *rest))(operand) @ operand

    wanted = _expected(operand, output, starts, send, offsets, 1)
    everything = operand, output, starts, send, offsets, receive
    identical(stacked(mesh, beside_a_batch, *everything), wanted)
    np.testing.assert_allclose(stacked(mesh, tangents, *everything), wanted, rtol=1e-6)


def test_index_groups_exchange_within(stacked, identical, mesh_of):
    mesh = mesh_of((4,), ("i",))
    operand = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    ones = np.ones((4, 2), np.int32)
    starts = np.tile(np.arange(2, dtype=np.int32), (4, 1))
    groups = [[0, 3], [2, 1]]
    offsets = np.zeros((4, 2), np.int32)
    offsets[[3, 1]] = 1  # the rank within its group

    def program(*operands):
        return jaxcomm.ragged_all_to_all(
            *operands, axis_name="i", axis_index_groups=groups
        )

    found = np.asarray(
        stacked(
            mesh, program, operand, np.zeros_like(operand), starts, ones, offsets, ones
        )
    )
    identical(found[[0, 3]], operand[[0, 3]].T)
    identical(found[[2, 1]], operand[[2, 1]].T)


@pytest.mark.host_only(reason="over NCCL offsets stay on the device, unread")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"receive": 1}, r"rank 0 sends 1 rows to rank 0, which expects 2"),
        ({"starts": 90}, r"takes 1 rows from row 90 on of an operand with 4 rows"),
        ({"offsets": -1}, r"to row -1 on of an output with 4 rows"),
        ({"offsets": 4}, r"to row 4 on of an output with 4 rows"),
    ],
)
def test_sizes_that_do_not_fit_raise_and_name_the_slice(stacked, mesh, change, message):
    ones = np.ones((SIZE, SIZE), np.int32)
    base = np.tile(np.arange(SIZE, dtype=np.int32), (SIZE, 1))
    indices = {"starts": base, "send": ones, "offsets": base.T, "receive": ones}
    bad = {name: x.copy() for name, x in indices.items()}
    for name, value in change.items():
        bad[name][0, 0] += value
        if name != "receive":
            bad[name][0, 0] = value
    x = np.arange(SIZE * 4, dtype=np.float32).reshape(SIZE, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message) as caught:
        jax.block_until_ready(stacked(mesh, _exchange(), x, 0 * x, *bad.values()))
    assert "ragged_all_to_all" in str(caught.value)
    found = stacked(mesh, _exchange(), x, 0 * x, *indices.values())
    np.testing.assert_array_equal(found, x.T)
    assert [c.stats()["in_flight"] for c in jaxcomm.communicators()] == [0]


@pytest.mark.host_only(reason="over NCCL offsets stay on the device, unread")
@pytest.mark.parametrize("name", ["starts", "offsets"])
def test_rows_beyond_all_integers_are_refused(stacked, mesh, name):
    """Their sum with the number of rows is negative, in 64 bits."""
    with jax.enable_x64(True):
        indices = {
            "starts": np.zeros((SIZE, SIZE), np.int64),
            "send": np.full((SIZE, SIZE), 2, np.int64),
            "offsets": np.zeros((SIZE, SIZE), np.int64),
            "receive": np.full((SIZE, SIZE), 2, np.int64),
        }
        indices[name][0, 0] = 2**63 - 1
        x = np.zeros((SIZE, 4), np.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"row {2**63 - 1} on of"):
            jax.block_until_ready(stacked(mesh, _exchange(), x, x, *indices.values()))


def test_gathered_a_rank_computes_what_it_receives_alone(mesh_of, default_backend):
    """A program that does not grow with the ranks: not by what the others receive."""
    # The host's own exchange gathers nothing.
    backend = "xla" if default_backend == "host" else default_backend
    lines = []
    for size in (2, 8):
        mesh = mesh_of((size,), ("i",))
        shapes = [(size * 24, 3), (size * 40, 3), *[(size * size,)] * 4]
        dtypes = [np.float32] * 2 + [np.int32] * 4
        program = jax.shard_map(
            _exchange(backend), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
        )
        text = jax.jit(program).lower(*map(jax.ShapeDtypeStruct, shapes, dtypes))
        lines.append(text.as_text().splitlines())
        assert any(f"tensor<{size}x24x3xf32>" in line for line in lines[-1])
    assert len(lines[0]) == len(lines[1])
