"""Offsets and sizes of every integer type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


def over(mesh, call, *operands, n=6):
    spec = jax.P("i")
    return np.asarray(
        jax.block_until_ready(
            jax.jit(
                jax.shard_map(
                    call, mesh=mesh, in_specs=(spec,) * len(operands), out_specs=spec
                )
            )(*operands)
        )
    )


STARTS, SENDS = [0, 100], [10, 28]  # 100 + 28 is no int8
THERE, RECEIVES = np.array([[0, 60], [10, 100]]), np.array([[10, 10], [28, 28]])


def indices(dtype):
    rows = (STARTS * 2, SENDS * 2, THERE.ravel(), RECEIVES.ravel())
    return [np.array(row).astype(dtype) for row in rows]


def expected(x, out):
    x, out = x.reshape(2, 200), out.copy().reshape(2, 200)
    for s in range(2):
        for t in range(2):
            n = SENDS[t]
            out[t, THERE[s, t] :][:n] = x[s, STARTS[t] :][:n]
    return out


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("way", ["host", "xla", "own axis"])
def test_narrow_indices_do_not_overflow(mesh_of, dtype, way):
    x, out = np.arange(400, dtype=np.float32), -np.ones(400, np.float32)
    backend = None if way == "own axis" else way

    def call(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i", backend=backend)

    with jax.numpy_dtype_promotion("standard"):
        if way == "own axis":
            found = jax.jit(jax.vmap(call, axis_name="i"))(
                *(a.reshape(2, -1) for a in (x, out, *indices(dtype)))
            )
        else:
            found = over(mesh_of((2,), ("i",)), call, x, out, *indices(dtype))
    np.testing.assert_array_equal(np.asarray(found).reshape(2, 200), expected(x, out))


@pytest.mark.parametrize("wrt", [0, 1])
def test_gradient_with_narrow_indices(mesh_of, wrt):
    rng = np.random.default_rng(0)
    x, out = rng.standard_normal((2, 400)).astype(np.float32)

    def gradient(*a):
        return jax.grad(
            lambda x, o: jnp.sin(
                jaxcomm.ragged_all_to_all(x, o, *a[2:], axis_name="i")
            ).sum(),
            wrt,
        )(*a[:2])

    with jax.numpy_dtype_promotion("standard"):
        found = [
            over(mesh_of((2,), ("i",)), gradient, x, out, *indices(d))
            for d in ("int8", "int32")
        ]
    np.testing.assert_array_equal(*found)


def test_vmap_with_narrow_indices(mesh_of):
    x, out = np.random.default_rng(0).standard_normal((2, 8, 50)).astype(np.float32)
    io = np.tile([0, 20], (8, 1))
    ss = np.full((8, 2), 20)
    oo = np.repeat([[0, 0], [20, 20]], 4, 0)
    rs = ss
    call = jax.vmap(lambda *a: jaxcomm.ragged_all_to_all(*a, axis_name="i"))
    found = [
        over(
            mesh_of((2,), ("i",)),
            call,
            x,
            out,
            *(a.astype(d) for a in (io, ss, oo, rs)),
        )
        for d in ("int8", "int32")
    ]
    np.testing.assert_array_equal(*found)


def test_strict_promotion_minds_no_index_type(mesh_of):
    x, out = np.zeros(400, np.float32), np.zeros(400, np.float32)
    over(
        mesh_of((2,), ("i",)),
        lambda *a: jax.grad(
            lambda x: jaxcomm.ragged_all_to_all(x, *a[1:], axis_name="i").sum()
        )(a[0]),
        x,
        out,
        *indices("int16"),
    )


def test_offsets_above_half_of_an_unsigned_type(mesh_of):
    mesh = mesh_of((2,), ("i",))
    x, out = np.arange(400, dtype=np.float32), np.zeros(400, np.float32)
    io, one = np.array([150, 199] * 2, np.uint8), np.ones(4, np.uint8)
    oo = np.array([150, 150, 199, 199], np.uint8)
    found = over(
        mesh,
        lambda *a: jaxcomm.ragged_all_to_all(*a, axis_name="i"),
        x,
        out,
        io,
        one,
        oo,
        one,
    )
    want = np.zeros((2, 200), np.float32)
    for s in range(2):
        for t in range(2):
            want[t, oo[2 * s]] = x.reshape(2, 200)[s, io[t]]
    np.testing.assert_array_equal(found.reshape(2, 200), want)


@pytest.mark.host_only(reason="over NCCL offsets stay on the device, unread")
@pytest.mark.parametrize(
    ("io", "message"),
    [
        (200, "row 200 on of an operand with 200 rows"),
        (3_000_000_000, "row 3000000000 on of an operand"),
    ],
)
def test_the_first_row_beyond_is_refused(mesh_of, io, message):
    x = np.zeros(400, np.float32)
    one, zero = np.ones(4, np.uint32), np.zeros(4, np.uint32)
    starts = zero.copy()
    starts[0] = io
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        over(
            mesh_of((2,), ("i",)),
            lambda *a: jaxcomm.ragged_all_to_all(*a, axis_name="i"),
            x,
            x,
            starts,
            one,
            zero,
            one,
        )


@pytest.mark.host_only(reason="over NCCL offsets stay on the device, unread")
@pytest.mark.parametrize("which", [0, 2], ids=["input", "output"])
@pytest.mark.parametrize("offset", [-1, 3, 4, 2**31 - 1])
def test_under_vmap_no_slice_reaches_into_a_neighbour(mesh_of, which, offset):
    x = np.zeros((6, 4), np.float32)  # three examples of four rows on each rank
    # Two rows each, to and from row 0 and 2.
    indices = [np.tile([0, 2], (6, 1)).astype(np.int32) for _ in range(4)]
    indices[1][:] = indices[3][:] = 2
    indices[2] = np.repeat([[0, 0], [2, 2]], 3, 0).astype(np.int32)
    call = jax.vmap(lambda *a: jaxcomm.ragged_all_to_all(*a, axis_name="i"))
    mesh = mesh_of((2,), ("i",))
    over(mesh, call, x, x, *indices)
    indices[which][1, 0] = offset
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"row 12 on of an o.*12 rows"):
        over(mesh, call, x, x, *indices)


@pytest.mark.parametrize(
    ("which", "value"),
    [(0, 3), (0, -1), (1, -1), (1, 5), (2, 3), (2, 2**31 - 1), (3, 1)],
)
def test_under_vmap_of_the_axis_what_does_not_fit_is_nan(which, value):
    x = np.ones((2, 4), np.float32)
    indices = [np.tile([0, 2], (2, 1)).astype(np.int32) for _ in range(4)]
    indices[1][:] = indices[3][:] = 2
    indices[2] = np.repeat([[0, 2]], 2, 0).T.astype(np.int32)
    call = jax.vmap(
        lambda *a: jaxcomm.ragged_all_to_all(*a, axis_name="i"), axis_name="i"
    )
    np.testing.assert_array_equal(call(x, x, *indices), x)
    # Of rank 1, to or from rank 0.
    indices[which][0 if which == 3 else 1, 1 if which == 3 else 0] = value
    found = call(x, x, *indices)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], x[1])
    assert (call(x.astype(int), x.astype(int), *indices)[0] < 0).all()


def test_the_gradient_stays_within_its_groups(mesh_of):
    mesh, groups = mesh_of((4,), ("i",)), [[0, 3], [2, 1]]
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    starts, ones = np.tile(np.arange(2, dtype=np.int32), 4), np.ones(8, np.int32)
    offsets = np.repeat(
        np.array([0, 1, 0, 1], np.int32), 2
    )  # the rank within its group

    def call(x, w, *index):
        return jaxcomm.ragged_all_to_all(
            x, jnp.zeros_like(x), *index, axis_name="i", axis_index_groups=groups
        )

    w = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    found = over(
        mesh,
        lambda x, w, *i: jax.grad(lambda x: (call(x, w, *i) * w).sum())(x),
        x,
        w,
        starts,
        ones,
        offsets,
        ones,
    )
    want, w2 = np.zeros((4, 2), np.float32), w.reshape(4, 2)
    for group in groups:
        for s, source in enumerate(group):
            for t, target in enumerate(group):
                want[source, t] = w2[target, s]
    np.testing.assert_array_equal(found.reshape(4, 2), want)
