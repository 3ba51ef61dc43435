"""Every collective under every transformation, against jax.lax or one device."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5


CHOICE = catalogue.fixed(4)
TWINS = {n: case for n, case in catalogue.CASES.items() if case.lax_grad}
# What jax.lax cannot differentiate or has not.
BEYOND = {n: case for n, case in catalogue.CASES.items() if not case.lax_grad}


def _loss(result):
    """Weighs every element otherwise, so that a misplaced gradient shows."""
    result = jnp.sin(result)
    weights = jnp.linspace(-1.0, 2.0, result.size, dtype=result.dtype)
    return (result.ravel() * weights).sum()


def _derivatives(call):
    """Value, gradient, JVP, second order and checkpoint of ``call``, on a device."""

    def program(x, direction):
        def local_loss(x):
            return _loss(call(x))

        def checkpointed(x):
            return _loss(jax.checkpoint(lambda x: jnp.cos(call(x * x)))(x))

        gradient, second = jax.jvp(jax.grad(local_loss), (x,), (direction,))
        return {
            "jvp": jax.jvp(call, (x,), (direction,)),
            "grad": gradient,
            "grad along a direction": second,
            "grad of grad": jax.grad(
                lambda x: (jax.grad(local_loss)(x) * direction).sum()
            )(x),
            "checkpoint": jax.grad(checkpointed)(x),
        }

    return program


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_are_those_of_jax_lax(stacked, near, values, mesh, x, check_vma):
    direction = values("float32", x.shape, 1)

    def program(lib):
        def run(x, direction):
            return {
                name: _derivatives(lambda x: case(lib, x, "i", CHOICE))(x, direction)  # noqa: B023
                for name, case in TWINS.items()
            }

        return run

    ours = stacked(mesh, program(jaxcomm), x, direction, check_vma=check_vma)
    lax = stacked(mesh, program(jax.lax), x, direction, check_vma=check_vma)
    for name, expected in lax.items():
        for what in expected:
            near(
                ours[name][what], expected[what], ROUNDING, f"{name}: {what}", ROUNDING
            )


def _of(*kinds):
    return [name for name, case in BEYOND.items() if case.kind in kinds]


MAXIMA, PRODUCTS, LINEAR = _of("extreme"), _of("product"), _of("move", "sum")


@pytest.mark.parametrize(
    ("names", "backend", "check_vma"),
    [
        pytest.param(MAXIMA, "host", True, id="maxima"),
        pytest.param(MAXIMA, "host", False, id="maxima untyped"),
        pytest.param(PRODUCTS, "host", False, id="products untyped"),
        pytest.param(LINEAR, "host", True, id="linear"),
        pytest.param(LINEAR, "host", False, id="linear untyped"),
        pytest.param((*MAXIMA, *LINEAR[1::2]), "xla", True, id="in xla"),
    ],
)
def test_derivatives_are_those_of_the_same_on_one_device(
    monkeypatch, stacked, near, values, mesh, x, names, check_vma, backend
):
    monkeypatch.setattr("jaxcomm.config.BACKEND", backend)
    direction = values("float32", x.shape, 1)

    def program(x, direction):
        return {
            name: _derivatives(
                lambda x: BEYOND[name](jaxcomm, x, "i", CHOICE)  # noqa: B023
            )(x, direction)
            for name in names
        }

    found = stacked(mesh, program, x, direction, check_vma=check_vma)

    def on_one_device(call):
        def loss_of(function):
            return lambda stack: jax.vmap(_loss)(function(stack)).sum()

        def run(stack, direction):
            loss = loss_of(call)
            gradient, second = jax.jvp(jax.grad(loss), (stack,), (direction,))
            return {
                "jvp": jax.jvp(call, (stack,), (direction,)),
                "grad": gradient,
                "grad along a direction": second,
                "grad of grad": second,  # the Hessian is symmetric
                "checkpoint": jax.grad(loss_of(lambda s: jnp.cos(call(s * s))))(stack),
            }

        return run

    expected_of = jax.jit(
        lambda *operands: {
            n: on_one_device(BEYOND[n].model(CHOICE))(*operands) for n in names
        }
    )(x, direction)
    for name, expected in expected_of.items():
        for what in expected:
            # What is typed as equal on all devices is one loss, not one on each: that
            # is the next test.
            if check_vma and BEYOND[name].shared and what != "jvp":
                continue
            got = found[name][what]
            near(got, expected[what], ROUNDING, f"{name}: {what}", ROUNDING)


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "pprod"])
def test_an_unvarying_loss_counts_once(stacked, near, mesh, x, name):
    """Under check_vma=True the gradient of an all-reduced loss is that of one loss."""
    model = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min, "pprod": jnp.prod}[name]

    def loss(x):
        return _loss(getattr(jaxcomm, name)(x, "i"))

    def program(x, direction):
        hessian = jax.jvp(jax.grad(loss), (x,), (direction,))[1]
        return (
            jax.grad(loss)(x),
            hessian,
            jax.grad(lambda x: (jax.grad(loss)(x) * direction).sum())(x),
        )

    direction = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    found = stacked(mesh, program, x, direction)

    def dense(stack):
        return _loss(model(stack, axis=0))

    gradient, hessian = jax.jvp(jax.grad(dense), (x,), (direction,))
    near(found, (gradient, hessian, hessian), ROUNDING, name, ROUNDING)


def test_a_gather_typed_as_equal_has_each_its_own_part_as_gradient(
    stacked, near, mesh, x
):
    """Its one result is one loss: nothing is summed over the devices."""

    def loss(x):
        return _loss(jaxcomm.all_gather(x, "i", axis=1, to="invarying"))

    def dense(stack):
        return _loss(jnp.moveaxis(stack, 0, 1))

    found = stacked(mesh, lambda x: (loss(x), jax.grad(loss)(x)), x)
    near(found[1], jax.grad(dense)(x), ROUNDING, "", ROUNDING)
    near(found[0], np.full(4, dense(x), np.float32), ROUNDING)


def test_equal_maxima_share_the_gradient(stacked, mesh):
    x = np.array([[1.0, 5.0], [3.0, 5.0], [3.0, 5.0], [2.0, 5.0]], np.float32)
    found = stacked(mesh, jax.grad(lambda x: jaxcomm.pmax(x, "i").sum()), x)
    expected = [[0, 0.25], [0.5, 0.25], [0.5, 0.25], [0, 0.25]]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_the_gradient_of_a_product_is_right_where_factors_are_zero(stacked, mesh):
    x = np.array(
        [[2.0, 0.0, 0.0], [3.0, 5.0, 0.0], [4.0, 7.0, 2.0], [1.0, 1, 3]], np.float32
    )
    found = stacked(mesh, jax.grad(lambda x: jaxcomm.pprod(x, "i").sum()), x)
    others = np.stack([np.prod(np.delete(x, rank, 0), 0) for rank in range(4)])
    np.testing.assert_array_equal(found, others)


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


@pytest.mark.parametrize("family", ["twins", "maxima", "others"])
def test_vmap_over_data_is_a_loop_over_examples(stacked, near, mesh, values, family):
    x = values("float32", (4, 4, 8, 3))  # the examples last
    cases = {"twins": TWINS, "maxima": MAXIMA, "others": {*PRODUCTS, *LINEAR}}[family]
    calls = {
        name: lambda x, case=catalogue.CASES[name]: case(jaxcomm, x, "i", CHOICE)
        for name in cases
    }

    def program(x):
        results = {}
        for name, call in calls.items():
            mapped = jax.vmap(call, in_axes=2, out_axes=1)(x)
            looped = jnp.stack([call(x[..., b]) for b in range(3)], 1)
            gradient = jax.grad(
                lambda x, c=call: _loss(jax.vmap(c, in_axes=2, out_axes=1)(x))
            )(x)
            expected = jax.grad(
                lambda x, c=call: _loss(jnp.stack([c(x[..., b]) for b in range(3)], 1))
            )(x)
            results[name] = (mapped, gradient), (looped, expected)
        return results

    for name, (found, expected) in stacked(mesh, program, x).items():
        near(found, expected, ROUNDING, name, ROUNDING)


def test_gradients_pass_through_vmapped_axes(near, values):
    x = values("float32", (4, 8))

    def run(lib):
        def loss(x):
            def local(x):
                return lib.psum(jnp.sin(x), "v"), lib.all_gather(x * x, "v")

            return sum(map(_loss, jax.vmap(local, axis_name="v")(x)))

        return jax.value_and_grad(loss)(x)

    ours, lax = jax.jit(lambda: run(jaxcomm))(), jax.jit(lambda: run(jax.lax))()
    near(ours, lax, 1e-4, "", ROUNDING)  # a sum of 160 sines


def test_eager_shard_map_runs_every_collective(stacked, near, mesh, x):
    def program(x):
        return {
            name: case(jaxcomm, x, "i", CHOICE)
            for name, case in catalogue.CASES.items()
        }

    eager = stacked(mesh, program, x, jit=False)
    near(eager, stacked(mesh, program, x), ROUNDING, "", ROUNDING)


def test_a_custom_vjp_may_use_collectives_both_ways(stacked, near, mesh, x):
    @jax.custom_vjp
    def shift(x):
        return jaxcomm.ring_shift(x, "i")

    shift.defvjp(
        lambda x: (shift(x), None),
        lambda _, ct: (jaxcomm.ring_shift(ct, "i", -1),),
    )
    found = stacked(mesh, jax.grad(lambda x: _loss(shift(x))), x)
    expected = stacked(mesh, jax.grad(lambda x: _loss(jaxcomm.ring_shift(x, "i"))), x)
    near(found, expected, 0)  # the same instructions


def test_leaves_of_different_rank_are_scattered_back_each_by_its_own_dimension(
    stacked, mesh
):
    """The last dimension is another one for each leaf; jax.lax takes leaves alone."""
    cube = np.arange(4 * 2 * 8 * 8, dtype=np.float32).reshape(4, 2, 8, 8)
    x = {"cube": cube, "flat": cube.ravel()[:32].reshape(4, 8)}

    def ours(x):
        return jaxcomm.psum_scatter(x, "i", scatter_dimension=-1, tiled=True)

    def each(x):
        return {
            name: jax.lax.psum_scatter(
                leaf, "i", scatter_dimension=leaf.ndim - 1, tiled=True
            )
            for name, leaf in x.items()
        }

    def gradient(scatter):
        def loss(x):
            weighed = (
                (jnp.sin(part) * jnp.arange(1.0, part.size + 1).reshape(part.shape))
                for part in scatter(x).values()
            )
            return sum(part.sum() for part in weighed)

        return jax.grad(loss)

    found, expected = (stacked(mesh, gradient(each_), x) for each_ in (ours, each))
    for name in x:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-3)
