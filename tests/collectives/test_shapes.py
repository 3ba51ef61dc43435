"""Zero, odd, unaligned and large shapes, and every dimension to gather or cut along."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm


def _numbers(*shape, dtype=np.float32):
    """Distinct small integers, so that a misplaced element shows."""
    return (np.arange(np.prod(shape)) % 8191).reshape(shape).astype(dtype)


def _check(mesh, cases, x):
    """Run calls on ``x`` in one program, each with arguments, and compare to models."""
    found = models.run_stacked(mesh, lambda x: [call(x) for call, _ in cases], x)
    for result, (_, model) in zip(found, cases, strict=True):
        models.assert_identical(result, jax.tree.map(model, x))


def _case(call, model, *args, **options):
    return lambda x: call(x, "i", *args, **options), model


PAIRS = [(3, 0), (0, 2)]
OF_ANY_SHAPE = [
    _case(jaxcomm.psum, models.all_reduce("sum")),
    _case(jaxcomm.pmax, models.all_reduce("max")),
    _case(jaxcomm.all_gather, models.all_gather()),
    _case(jaxcomm.pgather, models.only_on(1, models.all_gather()), 1),
    _case(jaxcomm.ppermute, models.permute(PAIRS), PAIRS),
    _case(jaxcomm.pbroadcast, models.broadcast(2), 2),
    _case(jaxcomm.preduce, models.only_on(2, models.all_reduce("sum")), 2),
    _case(jaxcomm.pscan, models.scan()),
    _case(jaxcomm.pscan, models.scan("sum", True, True), exclusive=True, reverse=True),
    _case(jaxcomm.pbarrier, models.whole),
]


def _scatter_along(d, tiled):
    summed, cut = models.reduce_scatter(d % 3, tiled), models.scatter(1, d % 3, tiled)
    return [
        _case(jaxcomm.psum_scatter, summed, scatter_dimension=d, tiled=tiled),
        _case(jaxcomm.pscatter, cut, 1, axis=d, tiled=tiled),
    ]


def _gather_along(axis, tiled):
    model = models.all_gather(axis, tiled)
    return _case(jaxcomm.all_gather, model, axis=axis, tiled=tiled)


def _exchange(split, concat, tiled):
    model = models.all_to_all(split % 3, concat % 3, tiled)
    return _case(jaxcomm.all_to_all, model, split, concat, tiled=tiled)


def test_scalars_odd_lengths_and_empty_arrays(mesh):
    shapes = [(), (0,), (1,), (7,), (1023,), (3, 0, 5), (2, 1, 3), (65, 33)]
    x = [_numbers(4, *shape) for shape in shapes]
    _check(mesh, OF_ANY_SHAPE, [*x, (_numbers(4, 3, 5) % 8).astype("int4")])


def test_empty_dimensions_can_be_cut_and_joined(mesh):
    cut = [*_scatter_along(0, True), _exchange(0, 1, True), _gather_along(1, True)]
    _check(mesh, cut, _numbers(4, 0, 3, 1))
    _check(mesh, _scatter_along(0, False), _numbers(4, 4, 0, 1))

    def emulated(x):
        loss = jax.grad(lambda x: jaxcomm.all_gather(x, ("v", "i")).sum())
        return jaxcomm.psum_scatter(x, ("v", "i"), tiled=True), loss(x)

    call = jax.vmap(emulated, axis_name="v")
    parts, gradient = models.run_stacked(mesh, call, _numbers(4, 2, 8, 0))
    assert (parts.shape, gradient.shape) == ((4, 2, 1, 0), (4, 2, 8, 0))


def test_gathers_along_every_axis(mesh):
    cases = [(a, False) for a in range(-4, 4)] + [(a, True) for a in range(-3, 3)]
    _check(mesh, [_gather_along(*case) for case in cases], _numbers(4, 3, 2, 5))


@pytest.mark.parametrize("tiled", [False, True])
def test_sums_scatters_and_exchanges_along_every_dimension(mesh, tiled):
    pairs = [(s, c) for s in range(3) for c in range(3)] + [(-1, 0), (0, -1), (-2, -2)]
    cases = [case for d in range(-3, 3) for case in _scatter_along(d, tiled)]
    cases += [_exchange(*pair, tiled) for pair in pairs]
    _check(mesh, cases, _numbers(4, 8, 4, 12) if tiled else _numbers(4, 4, 4, 4))


def test_leaves_of_different_rank_count_negative_axes_from_their_own_end(mesh):
    x = {"flat": _numbers(4, 8), "cube": _numbers(4, 2, 3, 8)}

    def scattered(x):
        return jaxcomm.psum_scatter(x, "i", scatter_dimension=-1, tiled=True)

    def loss(x):
        return sum((leaf**2).sum() / 2 for leaf in jax.tree.leaves(scattered(x)))

    def program(x):
        gathered = jaxcomm.all_gather(x, "i", axis=-1)
        return gathered, scattered(x), jax.grad(loss)(x)

    gathered, parts, gradient = found = models.run_stacked(mesh, program, x)
    models.assert_identical(jax.vmap(program, axis_name="i")(x), found)
    models.assert_identical(gathered["flat"][0], np.moveaxis(x["flat"], 0, -1))
    models.assert_identical(gathered["cube"][0], np.moveaxis(x["cube"], 0, -1))
    models.assert_identical(parts["cube"][1], x["cube"].sum(0)[..., 2:4])
    total = jax.tree.map(models.all_reduce("sum"), x)
    models.assert_identical(gradient, total)


def test_slices_that_start_off_alignment(mesh):
    """XLA may hand a slice over in place, at any byte of a buffer."""
    x = _numbers(4, 1031, dtype=np.uint8)

    def pieces(x):
        return [x[1:], x[3:1026], x[5:6], x[7:1000].astype(jnp.bfloat16)]

    def program(x):
        parts = pieces(x)
        return jaxcomm.psum(parts, "i"), jaxcomm.all_gather(parts, "i", tiled=True)

    sums, gathered = models.run_stacked(mesh, program, x)
    for i, row in enumerate(zip(*map(pieces, x), strict=True)):
        models.assert_identical(sums[i][3], models.fold(np.stack(row), "sum"))
        models.assert_identical(gathered[i][3], np.concatenate(row))


@pytest.mark.host_only(reason="the threads are the host backend's")
# 2.9 MiB: into the caches, and 8.03 MiB: past them.
@pytest.mark.parametrize(
    "shape", [(12, 249, 257), pytest.param((12, 500, 351), marks=pytest.mark.thorough)]
)
def test_megabytes_are_shared_out_between_threads(mesh, shape):
    """Of odd sizes, along contiguous and strided dimensions."""
    large = [*_scatter_along(0, True), _exchange(0, 1, True), _exchange(0, 2, True)]
    large += [_gather_along(1, True), _gather_along(3, False)]
    x = _numbers(4, *shape)
    _check(mesh, [*OF_ANY_SHAPE, *large], x)
    narrow = [_case(jaxcomm.pmax, models.all_reduce("max"))]
    _check(mesh, narrow, x.astype(jnp.bfloat16))
    strided = [*_scatter_along(1, True), _exchange(1, 0, True), _exchange(1, 2, True)]
    _check(mesh, strided, _numbers(4, shape[1], 8, shape[2]))
