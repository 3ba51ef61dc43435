"""Derivatives of every collective, against jax.lax or one device."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

traced = pytest.mark.host_only(reason="made of collectives that other files run")

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5


CHOICE = catalogue.fixed(4)
TWINS = {n: case for n, case in catalogue.CASES.items() if case.lax_grad}
# What jax.lax cannot differentiate or has not.
BEYOND = {n: case for n, case in catalogue.CASES.items() if not case.lax_grad}


def _calling(lib, name):
    return lambda x: catalogue.CASES[name](lib, x, "i", CHOICE)


def _loss(result):
    """Weighs every element otherwise, so that a misplaced gradient shows."""
    result = jnp.sin(result)
    weights = jnp.linspace(-1.0, 2.0, result.size, dtype=result.dtype)
    return (result.ravel() * weights).sum()


def _first(call, loss, x, direction):
    return {
        "jvp": jax.jvp(call, (x,), (direction,)),
        "grad": jax.grad(lambda x: loss(call(x)))(x),
    }


def _second(call, loss, x, direction):
    def gradient(x):
        return jax.grad(lambda x: loss(call(x)))(x)

    def checkpointed(x):
        return loss(jax.checkpoint(lambda x: jnp.cos(call(x * x)))(x))

    return {
        "grad along a direction": jax.jvp(gradient, (x,), (direction,))[1],
        "grad of grad": jax.grad(lambda x: (gradient(x) * direction).sum())(x),
        "checkpoint": jax.grad(checkpointed)(x),
    }


@traced
@pytest.mark.parametrize(
    ("derivatives", "names", "check_vma"),
    [
        (_first, TWINS, True),
        (_first, TWINS, False),
        (_second, ("pmean", "psum_scatter_tiled", "pshuffle"), True),
        (_second, ("psum", "all_gather"), False),
    ],
)
def test_derivatives_are_those_of_jax_lax(
    stacked, near, values, mesh, x, derivatives, names, check_vma
):
    direction = values("float32", x.shape, 1)

    def run(lib):
        def program(x, direction):
            return {
                name: derivatives(_calling(lib, name), _loss, x, direction)
                for name in names
            }

        return stacked(mesh, program, x, direction, check_vma=check_vma)

    ours, lax = run(jaxcomm), run(jax.lax)
    for name in names:
        near(ours[name], lax[name], ROUNDING, name, ROUNDING)


def _of(*kinds):
    return [name for name, case in BEYOND.items() if case.kind in kinds]


MAXIMA, PRODUCTS, LINEAR = _of("extreme"), _of("product"), _of("move", "sum")


@traced
@pytest.mark.parametrize(
    ("derivatives", "names", "backend", "check_vma"),
    [
        pytest.param(_first, BEYOND, "host", False, id="untyped"),
        pytest.param(_first, (*MAXIMA, *LINEAR), "host", True, id="typed"),
        pytest.param(_second, (*MAXIMA, *PRODUCTS), "host", False, id="second"),
        pytest.param(_second, LINEAR[::3], "host", True, id="second of linear"),
        pytest.param(_first, (*MAXIMA, *LINEAR[1::2]), "xla", True, id="in xla"),
    ],
)
def test_derivatives_are_those_of_the_same_on_one_device(
    stacked, near, values, mesh, x, derivatives, names, check_vma, backend
):
    direction = values("float32", x.shape, 1)

    def program(x, direction):
        return {
            name: derivatives(_calling(jaxcomm, name), _loss, x, direction)
            for name in names
        }

    def on_one_device(x, direction):
        return {
            n: derivatives(
                BEYOND[n].model(CHOICE),
                lambda y: jax.vmap(_loss)(y).sum(),
                x,
                direction,
            )
            for n in names
        }

    with jaxcomm.using(backend=backend):
        found = stacked(mesh, program, x, direction, check_vma=check_vma)
    expected = jax.jit(on_one_device)(x, direction)
    for name in names:
        for what in expected[name]:
            # What is typed as equal on all devices is one loss, not one on each: that
            # is the next test.
            if check_vma and BEYOND[name].shared and what != "jvp":
                continue
            got, wanted = found[name][what], expected[name][what]
            near(got, wanted, ROUNDING, f"{name}: {what}", ROUNDING)


GROUPS = [[2, 0], [1, 3]]


def _in_groups(model):
    """Return the model of all four ranks, each in its group."""

    def run(stack):
        rows = {}
        for group in GROUPS:
            rows |= dict(zip(group, model(stack[np.array(group)]), strict=True))
        return jnp.stack([rows[rank] for rank in range(4)])

    return run


@traced
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_stay_in_their_groups(stacked, near, values, mesh, check_vma):
    x, direction = values("float32", (4, 2, 2)), values("float32", (4, 2, 2), 1)
    choice = catalogue.fixed(2)
    cases = {n: case for n, case in catalogue.KINDS.items() if case.takes_groups}

    def program(x, direction):
        def call(case):
            return lambda x: case(jaxcomm, x, "i", choice, axis_index_groups=GROUPS)

        return {n: _first(call(case), _loss, x, direction) for n, case in cases.items()}

    def on_one_device(x, direction):
        def loss(y):
            return jax.vmap(_loss)(y).sum()

        return {
            n: _first(_in_groups(case.model(choice)), loss, x, direction)
            for n, case in cases.items()
        }

    found = stacked(mesh, program, x, direction, check_vma=check_vma)
    expected = jax.jit(on_one_device)(x, direction)
    for name in cases:
        near(found[name], expected[name], ROUNDING, name, ROUNDING)


@traced
def test_an_unvarying_loss_counts_once(stacked, near, mesh, x):
    """Under check_vma=True the gradient of an all-reduced loss is that of one loss."""
    models = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min, "pprod": jnp.prod}
    direction = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def derivatives(loss, x, direction):
        return jax.jvp(jax.grad(loss), (x,), (direction,))

    def program(x, direction):
        def loss(name):
            return lambda x: _loss(getattr(jaxcomm, name)(x, "i"))

        return {name: derivatives(loss(name), x, direction) for name in models}

    def dense(x, direction):
        def loss(name):
            return lambda stack: _loss(models[name](stack, axis=0))

        return {name: derivatives(loss(name), x, direction) for name in models}

    found, expected = stacked(mesh, program, x, direction), jax.jit(dense)(x, direction)
    for name in models:
        near(found[name], expected[name], ROUNDING, name, ROUNDING)


@traced
@pytest.mark.parametrize("tiled", [False, True])
def test_a_gather_typed_as_equal_has_each_its_own_part_as_gradient(
    stacked, near, mesh, x, tiled
):
    """Its one result is one loss: nothing is summed over the devices."""

    def loss(x):
        return _loss(jaxcomm.all_gather(x, "i", axis=1, to="invarying", tiled=tiled))

    def dense(stack):
        parts = list(stack)
        return _loss(jnp.concatenate(parts, 1) if tiled else jnp.stack(parts, 1))

    total, gradient = stacked(mesh, jax.value_and_grad(loss), x)
    near(gradient, jax.grad(dense)(x), ROUNDING, "", ROUNDING)
    near(total, np.full(4, dense(x), np.float32), ROUNDING)


@traced
def test_equal_maxima_share_the_gradient_and_a_zero_factor_has_one(stacked, mesh):
    x = np.array([[1.0, 5.0], [3.0, 5.0], [3.0, 5.0], [2.0, 5.0]], np.float32)
    factors = np.array(
        [[2.0, 0.0, 0.0], [3.0, 5.0, 0.0], [4.0, 7.0, 2.0], [1.0, 1, 3]], np.float32
    )

    def program(x, factors):
        return (
            jax.grad(lambda x: jaxcomm.pmax(x, "i").sum())(x),
            jax.grad(lambda x: jaxcomm.pprod(x, "i").sum())(factors),
        )

    of_maximum, of_product = stacked(mesh, program, x, factors)
    expected = [[0, 0.25], [0.5, 0.25], [0.5, 0.25], [0, 0.25]]
    np.testing.assert_array_equal(of_maximum, np.array(expected, np.float32))
    others = np.stack([np.prod(np.delete(factors, rank, 0), 0) for rank in range(4)])
    np.testing.assert_array_equal(of_product, others)


def test_gradients_of_replicated_parameters_are_summed(mesh, near, values):
    """Data parallelism: parameters enter with P(), their gradient leaves with P()."""
    weights, data = values("float32", (8,)), values("float32", (4, 8), 1)

    def loss_and_grad(lib):
        def local(w, x):
            return jax.value_and_grad(lambda w: lib.pmean(jnp.sin(x @ w).sum(), "i"))(w)

        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(jax.P(), jax.P("i")),
                out_specs=jax.P(),
            )
        )(weights, data)

    near(loss_and_grad(jaxcomm), loss_and_grad(jax.lax), ROUNDING, "", ROUNDING)


def test_the_gradient_may_be_taken_outside_of_shard_map(mesh, near, values):
    weights, data = values("float32", (8, 8)), values("float32", (4, 8), 1)

    def train(lib):
        def local(w, x):
            hidden = lib.all_gather(x @ w, "i", tiled=True)
            part = lib.psum_scatter(jnp.tanh(hidden), "i", tiled=True)
            return lib.psum((part**2).sum(), "i")

        loss = jax.shard_map(
            local, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P()
        )
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, data)

    near(train(jaxcomm), train(jax.lax), 1e-4, "", ROUNDING)


@traced
def test_integer_leaves_travel_beside_differentiated_ones(stacked, mesh, x):
    counts = np.arange(4 * 3, dtype=np.int32).reshape(4, 3)

    def program(x, counts):
        def loss(x):
            tree = {"x": x, "n": counts, "flag": counts > 3}
            for step in (
                lambda t: jaxcomm.ring_shift(t, "i"),
                lambda t: jaxcomm.all_gather(t, "i"),
                lambda t: jaxcomm.psum_scatter(t, "i"),
                lambda t: jaxcomm.pscan(t, "i"),
                lambda t: jaxcomm.pmax(t, "i"),
            ):
                tree = step(tree)
            return (tree["x"] ** 2).sum(), tree["n"]

        return jax.grad(loss, has_aux=True)(x)

    gradient, aux = stacked(mesh, program, x, counts)
    assert np.abs(gradient).sum() > 0
    shifted = np.roll(counts, 1, 0)  # all_gather then psum_scatter: 4 x its own
    np.testing.assert_array_equal(aux[0], (4 * np.cumsum(shifted, 0)).max(0))


@traced
def test_leaves_of_different_rank_are_scattered_back_each_by_its_own_dimension(
    stacked, near, mesh, values
):
    """The last dimension is another one for each leaf; jax.lax takes leaves alone."""
    x = {"cube": values("float32", (4, 2, 3, 8)), "flat": values("float32", (4, 8), 1)}
    tiled = {"scatter_dimension": -1, "tiled": True}

    def ours(x):
        return jaxcomm.psum_scatter(x, "i", **tiled)

    def alone(x):
        return {name: jaxcomm.psum_scatter(x[name], "i", **tiled) for name in x}

    found, expected = (
        stacked(mesh, jax.grad(lambda x, f=f: sum(map(_loss, f(x).values()))), x)
        for f in (ours, alone)
    )
    near(found, expected, ROUNDING, "", ROUNDING)
