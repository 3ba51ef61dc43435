"""Every collective under every transformation, against jax.lax or one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((4,), ("i",))


@pytest.fixture
def x(values):
    return values("float32", (4, 4, 8))


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SOME = [(0, 2), (3, 1)]

# Functions of one (4, 8) array on each of 4 devices.
TWINS = {
    "psum": lambda lib, x: lib.psum(x, "i"),
    "pmean": lambda lib, x: lib.pmean(x, "i"),
    "all_gather": lambda lib, x: lib.all_gather(x, "i", axis=1),
    "all_gather_tiled": lambda lib, x: lib.all_gather(x, "i", axis=1, tiled=True),
    "psum_scatter": lambda lib, x: lib.psum_scatter(x, "i"),
    "psum_scatter_tiled": lambda lib, x: lib.psum_scatter(
        x, "i", scatter_dimension=1, tiled=True
    ),
    "all_to_all_tiled": lambda lib, x: lib.all_to_all(x, "i", 1, 0, tiled=True),
    "pswapaxes": lambda lib, x: lib.pswapaxes(x, "i", 0),
    "ppermute": lambda lib, x: lib.ppermute(x, "i", RING),
    "ppermute_some": lambda lib, x: lib.ppermute(x, "i", SOME),
}

# What jax.lax cannot differentiate or has not: each with the same on one device, a
# function of the (4, 4, 8) stack to the stack of results.
ROOT = 2


def _only(stack, value):
    return jnp.zeros((4, *value.shape), value.dtype).at[ROOT].set(value)


BEYOND = {
    "all_to_all": (  # jax.lax's has a gradient of the wrong shape
        lambda x: jaxcomm.all_to_all(x, "i", 0, 1),
        lambda s: jnp.transpose(s, (1, 2, 0)),
    ),
    "pmax": (
        lambda x: jaxcomm.pmax(x, "i"),
        lambda s: jnp.broadcast_to(s.max(0), s.shape),
    ),
    "pmin": (
        lambda x: jaxcomm.pmin(x, "i"),
        lambda s: jnp.broadcast_to(s.min(0), s.shape),
    ),
    "pprod": (
        lambda x: jaxcomm.pprod(x, "i"),
        lambda s: jnp.broadcast_to(s.prod(0), s.shape),
    ),
    "broadcast": (
        lambda x: jaxcomm.broadcast(x, "i", ROOT),
        lambda s: jnp.broadcast_to(s[ROOT], s.shape),
    ),
    "reduce": (lambda x: jaxcomm.reduce(x, "i", ROOT), lambda s: _only(s, s.sum(0))),
    "reduce_prod": (
        lambda x: jaxcomm.reduce(x, "i", ROOT, op="prod"),
        lambda s: _only(s, s.prod(0)),
    ),
    "reduce_max": (
        lambda x: jaxcomm.reduce(x, "i", ROOT, op="max"),
        lambda s: _only(s, s.max(0)),
    ),
    "gather": (
        lambda x: jaxcomm.gather(x, "i", ROOT, axis=1),
        lambda s: _only(s, jnp.moveaxis(s, 0, 1)),
    ),
    "scatter": (
        lambda x: jaxcomm.scatter(x, "i", ROOT),
        lambda s: s[ROOT],
    ),
    "scatter_tiled": (
        lambda x: jaxcomm.scatter(x, "i", ROOT, axis=1, tiled=True),
        lambda s: jnp.stack(jnp.split(s[ROOT], 4, axis=1)),
    ),
    "scan": (lambda x: jaxcomm.scan(x, "i"), lambda s: jnp.cumsum(s, 0)),
    "scan_reverse_exclusive": (
        lambda x: jaxcomm.scan(x, "i", reverse=True, exclusive=True),
        lambda s: jnp.cumsum(s[::-1], 0)[::-1] - s,
    ),
    "scan_prod": (
        lambda x: jaxcomm.scan(x, "i", op="prod"),
        lambda s: jnp.cumprod(s, 0),
    ),
    "ring_shift": (
        lambda x: jaxcomm.ring_shift(x, "i", 3),
        lambda s: jnp.roll(s, 3, 0),
    ),
    "barrier": (lambda x: jaxcomm.barrier(x, "i"), lambda s: s),
}


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
                name: _derivatives(lambda x: twin(lib, x))(x, direction)  # noqa: B023
                for name, twin in TWINS.items()
            }

        return run

    ours = stacked(mesh, program(jaxcomm), x, direction, check_vma=check_vma)
    lax = stacked(mesh, program(jax.lax), x, direction, check_vma=check_vma)
    for name, expected in lax.items():
        for what in expected:
            near(
                ours[name][what], expected[what], ROUNDING, f"{name}: {what}", ROUNDING
            )


MAXIMA = ("pmax", "pmin", "reduce_max")
PRODUCTS = ("pprod", "reduce_prod", "scan_prod")
LINEAR = tuple(name for name in BEYOND if name not in MAXIMA + PRODUCTS)


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
    monkeypatch.setenv("JAXCOMM_BACKEND", backend)
    direction = values("float32", x.shape, 1)

    def program(x, direction):
        return {name: _derivatives(BEYOND[name][0])(x, direction) for name in names}

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
        lambda *operands: {n: on_one_device(BEYOND[n][1])(*operands) for n in names}
    )(x, direction)
    for name, expected in expected_of.items():
        for what in expected:
            # What is typed as equal on all devices is one loss, not one on each: that
            # is the next test.
            if check_vma and name in ("pmax", "pmin", "pprod") and what != "jvp":
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
                lambda t: jaxcomm.scan(t, "i"),
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
    calls = {n: (lambda x, t=t: t(jaxcomm, x)) for n, t in TWINS.items()}
    if family != "twins":
        calls = {
            name: call
            for name, (call, _) in BEYOND.items()
            if (name in MAXIMA) == (family == "maxima")
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


def test_vmap_with_some_leaves_unbatched(stacked, identical, mesh, x):
    def program(x):
        def call(a, b):
            return jaxcomm.psum((a, b), "i"), jaxcomm.all_gather((a, b), "i", axis=1)

        return jax.vmap(call, in_axes=(0, None), out_axes=((0, None), (0, None)))(x, x)

    sums, gathered = stacked(mesh, program, x)
    identical(gathered[0][0], np.moveaxis(x, 0, 2))
    identical(gathered[1][0], np.moveaxis(x, 0, 1))
    identical(sums[0], sums[1])


AXIS_CALLS = {
    "psum": lambda lib, x, a: lib.psum(x, a),
    "pmean": lambda lib, x, a: lib.pmean(x, a),
    "pmax": lambda lib, x, a: lib.pmax(x, a),
    "all_gather": lambda lib, x, a: lib.all_gather(x, a),
    "all_gather_tiled": lambda lib, x, a: lib.all_gather(x, a, axis=1, tiled=True),
    "psum_scatter": lambda lib, x, a: lib.psum_scatter(x, a, tiled=True),
    "all_to_all": lambda lib, x, a: lib.all_to_all(x, a, 0, 1, tiled=True),
}


def test_vmap_over_the_axis_of_the_collective_needs_no_mesh(identical, near, values):
    x = values("float32", (4, 8, 3))

    def run(lib):
        return {
            name: jax.vmap(lambda x, c=call: c(lib, x, "v"), axis_name="v")(x)
            for name, call in AXIS_CALLS.items()
        }

    ours, lax = jax.jit(lambda: run(jaxcomm))(), jax.jit(lambda: run(jax.lax))()
    near(ours, lax, ROUNDING, "", ROUNDING)
    permuted = jax.vmap(lambda x: jaxcomm.ppermute(x, "v", SOME), axis_name="v")(x)
    expected = np.zeros_like(x)  # jax.lax wants full permutations here
    for source, target in SOME:
        expected[target] = x[source]
    identical(permuted, expected)
    stacks = {
        "scan": (jaxcomm.scan, np.cumsum(x, 0)),
        "ring_shift": (jaxcomm.ring_shift, np.roll(x, 1, 0)),
        "broadcast": (jaxcomm.broadcast, np.stack([x[0]] * 4)),
        "barrier": (jaxcomm.barrier, x),
    }
    for name, (call, expected) in stacks.items():
        found = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v")(x)
        near(found, expected, ROUNDING, name, ROUNDING)
    assert len(jaxcomm.communicators()) == 0


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


def test_index_groups_divide_a_vmapped_axis(near, values):
    x = values("float32", (4, 8))
    groups = [[0, 3], [2, 1]]

    def local(x):
        return (
            jaxcomm.psum(x, "v", axis_index_groups=groups),
            jaxcomm.all_gather(x, "v", axis_index_groups=groups),
        )

    sums, gathered = jax.vmap(local, axis_name="v")(x)
    for group in groups:
        for rank in group:
            np.testing.assert_allclose(sums[rank], x[group].sum(0), rtol=ROUNDING)
            np.testing.assert_array_equal(gathered[rank], x[group])


@pytest.mark.parametrize("order", [("i", "v"), ("v", "i")])
def test_vmap_over_one_axis_of_several(stacked, near, mesh, values, order):
    """The ranks are those of a mesh on which the vmapped axis is a real one."""
    x = values("float32", (4, 2, 8, 16))  # device, vmapped, data
    places = {"i": 0, "v": 1}
    sequence = np.moveaxis(x, [places[a] for a in order], [0, 1]).reshape(8, 8, 16)

    def program(x):
        return {
            name: jax.vmap(lambda x, c=call: c(jaxcomm, x, order), axis_name="v")(x)
            for name, call in AXIS_CALLS.items()
        } | {
            "scan": jax.vmap(lambda x: jaxcomm.scan(x, order), axis_name="v")(x),
            "broadcast": jax.vmap(
                lambda x: jaxcomm.broadcast(x, order, 5), axis_name="v"
            )(x),
        }

    found = stacked(mesh, program, x)
    expected = {
        name: jax.vmap(lambda x, c=call: c(jax.lax, x, "w"), axis_name="w")(sequence)
        for name, call in AXIS_CALLS.items()
    }
    expected |= {
        "scan": np.cumsum(sequence, 0),
        "broadcast": np.stack([sequence[5]] * 8),
    }
    for name, results in expected.items():
        shape = [x.shape[places[a]] for a in order]
        results = np.asarray(results).reshape(*shape, *results.shape[1:])
        results = np.moveaxis(results, [0, 1], [places[a] for a in order])
        near(found[name], results, ROUNDING, name, ROUNDING)


@pytest.mark.parametrize("order", [("i", "v"), ("v", "i")])
def test_a_permutation_over_a_vmapped_axis_and_a_mesh_axis(
    stacked, identical, mesh, values, order
):
    """A vmapped axis is none of the mesh's: it counts where it is named."""
    x = values("float32", (4, 2, 3))
    perm = [(0, 5), (5, 2), (2, 7), (7, 0), (1, 1)]

    def program(lib):
        return lambda x: jax.vmap(
            lambda x: lib.ppermute(x, order, perm), axis_name="v"
        )(x)

    found = np.asarray(stacked(mesh, program(jaxcomm), x))
    places = {"i": 0, "v": 1}
    sequence = np.moveaxis(x, [places[a] for a in order], [0, 1]).reshape(8, 3)
    moved = np.zeros_like(sequence)
    for source, target in perm:
        moved[target] = sequence[source]
    moved = moved.reshape(*(x.shape[places[a]] for a in order), 3)
    identical(found, np.moveaxis(moved, [0, 1], [places[a] for a in order]))


def test_vmap_of_a_shared_result_may_say_out_axes_none(values):
    x = values("float32", (4, 8))
    for call in (jaxcomm.psum, jaxcomm.pmax, jaxcomm.all_gather, jaxcomm.broadcast):
        shared = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v", out_axes=None)(x)
        every = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v")(x)
        np.testing.assert_array_equal(shared, every[3])


def test_control_flow_carries_collectives(stacked, near, mesh, x):
    def program(lib):
        def run(x):
            def step(carry, _):
                carry = lib.ppermute(jnp.sin(carry), "i", RING) + lib.pmean(carry, "i")
                return carry, lib.all_gather(carry.sum(), "i")

            scanned = jax.lax.scan(step, x, length=5)
            looped = jax.lax.fori_loop(
                0, 4, lambda k, c: lib.ppermute(c, "i", RING) * 0.5 + x, x
            )
            steps, _ = jax.lax.while_loop(
                lambda state: lib.pmax(state[1].max(), "i") < 50.0,
                lambda state: (state[0] + 1, state[1] * 2),
                (jnp.int32(0), jnp.abs(x)),
            )
            # The same branch everywhere: the predicate is equal on all devices.
            chosen = jax.lax.cond(
                lib.psum(x.sum(), "i") > 1e9,
                lambda x: lib.ppermute(x, "i", RING),
                lambda x: lib.ppermute(x, "i", SOME),
                x,
            )
            gradient = jax.grad(
                lambda x: (jax.lax.scan(step, x, length=3)[0] ** 2).sum()
            )(x)
            return scanned, looped, steps, chosen, gradient

        return run

    ours = stacked(mesh, program(jaxcomm), x)
    near(ours, stacked(mesh, program(jax.lax), x), ROUNDING, "", ROUNDING)


def test_operands_may_be_donated(mesh, x):
    spec = jax.P("i")
    everywhere = jax.NamedSharding(mesh, spec)

    def local(x):
        x = jaxcomm.ring_shift(x + 1, "i")
        return jaxcomm.barrier(jaxcomm.scan(x, "i"), "i")

    program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    for call in (
        local,
        lambda x: jaxcomm.barrier(x, "i"),
        lambda x: jaxcomm.psum(x, "i"),
    ):
        program = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        kept = jax.jit(program)(jax.device_put(x, everywhere))
        given = jax.device_put(x, everywhere)
        found = jax.jit(program, donate_argnums=0)(given)
        np.testing.assert_array_equal(found, kept)
        assert given.is_deleted()


def test_an_operand_that_is_used_again_keeps_its_value(stacked, mesh, x):
    """barrier hands its operand's buffer on: what else reads it must not notice."""

    def program(x):
        waited = jaxcomm.barrier(x, "i")
        changed = waited.at[0].set(100.0)
        return changed, x, jaxcomm.barrier(waited, "i")

    changed, kept, waited = stacked(mesh, program, x)
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(waited, x)
    np.testing.assert_array_equal(changed[:, 1:], x[:, 1:])


def test_eager_shard_map_runs_every_collective(stacked, near, mesh, x):
    def program(x):
        return {n: twin(jaxcomm, x) for n, twin in TWINS.items()} | {
            n: call(x) for n, (call, _) in BEYOND.items()
        }

    eager = stacked(mesh, program, x, jit=False)
    near(eager, stacked(mesh, program, x), ROUNDING, "", ROUNDING)


def test_some_axes_may_stay_automatic(make_mesh, near, values):
    mesh = make_mesh(a=2, b=4)
    x = values("float32", (4, 8, 6))

    def run(lib):
        def local(x):
            return (
                lib.psum(x, "b"),
                lib.all_gather(x, "b", axis=1, tiled=True),
                lib.ppermute(x, "b", RING),
                lib.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
            )

        @jax.jit
        def program(x):
            x = jax.lax.with_sharding_constraint(
                x, jax.NamedSharding(mesh, jax.P("b", None, "a"))
            )
            return jax.shard_map(
                local,
                mesh=mesh,
                axis_names={"b"},
                in_specs=jax.P("b"),
                out_specs=(jax.P(), jax.P("b"), jax.P("b"), jax.P("b")),
            )(x)

        return program(x)

    near(run(jaxcomm), run(jax.lax), ROUNDING, "", ROUNDING)


def test_nested_jit_and_shared_functions(stacked, near, mesh, x):
    def program(lib):
        @jax.jit
        def shared(x):
            return lib.psum(x, "i") + lib.ppermute(x, "i", RING)

        return lambda x: (shared(x), jax.jit(lambda x: shared(shared(x)))(x * 2))

    ours = stacked(mesh, program(jaxcomm), x)
    near(ours, stacked(mesh, program(jax.lax), x), ROUNDING, "", ROUNDING)


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


def test_unused_results_do_not_upset_the_others(stacked, identical, mesh, x):
    def program(x):
        jaxcomm.psum(x, "i")  # dead: XLA drops it, on every device alike
        a, _ = jaxcomm.all_gather((x, x + 1), "i")
        return a

    identical(stacked(mesh, program, x)[0], x)
