"""Derivatives of every collective, and of its halves, against jax.lax or one device."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import SPLIT_PHASE as HALVES

import jaxcomm

traced = pytest.mark.host_only(reason="made of collectives that other files run")

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5
CHOICE = catalogue.fixed(4)
TWINS = {n: case for n, case in catalogue.CASES.items() if case.lax_grad}
# What jax.lax cannot differentiate or has not.
BEYOND = {n: case for n, case in catalogue.CASES.items() if not case.lax_grad}
STARTED = (
    "ppermute_some", "psum", "all_gather", "all_gather_tiled", "psum_scatter",
    "all_to_all_tiled",
)  # fmt: skip


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
    ("lib", "derivatives", "names", "check_vma"),
    [
        (jaxcomm, _first, TWINS, True),
        (jaxcomm, _first, TWINS, False),
        (jaxcomm, _second, ("pmean", "psum_scatter_tiled", "pshuffle"), True),
        (jaxcomm, _second, ("psum", "all_gather"), False),
        (HALVES, _first, STARTED, True),
        (HALVES, _second, STARTED, True),
        pytest.param(HALVES, _second, STARTED, False, marks=pytest.mark.thorough),
    ],
)
def test_derivatives_are_those_of_jax_lax(
    stacked, near, values, mesh, x, lib, derivatives, names, check_vma
):
    x, direction = x * np.float32(0.5), values("float32", x.shape, 1)

    def run(lib):
        def program(x, direction):
            def calling(case):
                return lambda x: case(lib, x, "i", CHOICE)

            return {
                n: derivatives(calling(TWINS[n]), _loss, x, direction) for n in names
            }

        return stacked(mesh, program, x, direction, check_vma=check_vma)

    ours, lax = run(lib), run(jax.lax)
    for name in names:
        near(ours[name], lax[name], ROUNDING, name, ROUNDING)


def _of(*kinds):
    return [name for name, case in BEYOND.items() if case.kind in kinds]


MAXIMA, PRODUCTS, LINEAR = _of("extreme"), _of("product"), _of("move", "sum")
GROUPED = [name for name, case in catalogue.KINDS.items() if case.takes_groups]
GROUPS = [[2, 0], [1, 3]]
IN_GROUPS = {"axis_index_groups": GROUPS}


def _in_groups(model):
    """Return the model of all four ranks, each in its group."""

    def run(stack):
        rows = {}
        for group in GROUPS:
            rows |= dict(zip(group, model(stack[np.array(group)]), strict=True))
        return jnp.stack([rows[rank] for rank in range(4)])

    return run


@traced
@pytest.mark.parametrize(
    ("derivatives", "names", "options", "check_vma"),
    [
        pytest.param(_first, BEYOND, {}, False, id="untyped"),
        pytest.param(_first, (*MAXIMA, *LINEAR), {}, True, id="typed"),
        pytest.param(_second, (*MAXIMA, *PRODUCTS), {}, False, id="second"),
        pytest.param(_second, LINEAR[::3], {}, True, id="second of linear"),
        pytest.param(
            _first, (*MAXIMA, *LINEAR[1::2]), {"backend": "xla"}, True, id="in xla"
        ),
        pytest.param(_first, GROUPED, IN_GROUPS, True, id="typed groups"),
        pytest.param(_first, GROUPED, IN_GROUPS, False, id="untyped groups"),
    ],
)
def test_derivatives_are_those_of_the_same_on_one_device(
    stacked, near, values, mesh, x, derivatives, names, options, check_vma
):
    in_groups = "axis_index_groups" in options
    if in_groups:
        x = values("float32", (4, 2, 2))
    choice = catalogue.fixed(x.shape[1])
    direction = values("float32", x.shape, 1)

    def program(x, direction):
        def calling(case):
            return lambda x: case(jaxcomm, x, "i", choice, **options)

        return {
            name: derivatives(calling(catalogue.CASES[name]), _loss, x, direction)
            for name in names
        }

    def on_one_device(x, direction):
        def model(case):
            dense = case.model(choice)
            return _in_groups(dense) if in_groups else dense

        def loss(y):
            return jax.vmap(_loss)(y).sum()

        return {
            name: derivatives(model(catalogue.CASES[name]), loss, x, direction)
            for name in names
        }

    found = stacked(mesh, program, x, direction, check_vma=check_vma)
    expected = jax.jit(on_one_device)(x, direction)
    for name in names:
        if check_vma and catalogue.CASES[name].shared and not in_groups:
            # What is typed as equal on all devices is one loss, not one on each: that
            # is the next test.
            found[name] = {"jvp": found[name]["jvp"]}
        for what in found[name]:
            got, wanted = found[name][what], expected[name][what]
            near(got, wanted, ROUNDING, f"{name}: {what}", ROUNDING)


@traced
def test_a_loss_typed_as_equal_on_all_counts_once(stacked, near, mesh, x):
    def of(name, **options):
        return lambda x: getattr(jaxcomm, name)(x, "i", **options)

    equal = {"axis": 1, "to": "invarying"}
    cases = {
        "psum": (of("psum"), lambda stack: stack.sum(0)),
        "pmax": (of("pmax"), lambda stack: stack.max(0)),
        "pmin": (of("pmin"), lambda stack: stack.min(0)),
        "pprod": (of("pprod"), lambda stack: stack.prod(0)),
        "all_gather": (of("all_gather", **equal), lambda s: jnp.stack([*s], 1)),
        "tiled": (
            of("all_gather", tiled=True, **equal),
            lambda stack: jnp.concatenate([*stack], 1),
        ),
    }
    direction = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def derivatives(call, x, direction):
        return jax.jvp(jax.grad(lambda x: _loss(call(x))), (x,), (direction,))

    def program(x, direction):
        return {n: derivatives(call, x, direction) for n, (call, _) in cases.items()}

    def dense(x, direction):
        return {n: derivatives(model, x, direction) for n, (_, model) in cases.items()}

    found, expected = stacked(mesh, program, x, direction), jax.jit(dense)(x, direction)
    for name in cases:
        near(found[name], expected[name], ROUNDING, name, ROUNDING)


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


@traced
@pytest.mark.parametrize("collective", ["psum", "all_gather", "pscan"])
def test_integer_leaves_have_no_gradient_by_xla(mesh, x, collective):
    """Nor without ``check_vma``, by whose types JAX leaves some out."""
    counts = np.arange(4 * 3, dtype=np.int32).reshape(4, 3)

    def gradient(more):
        def local(x, counts):
            tree = {"x": x} | dict.fromkeys(more, counts)
            return getattr(jaxcomm, collective)(tree, "i", backend="xla")["x"][None]

        whole = jax.shard_map(
            local, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False
        )
        return jax.jit(jax.grad(lambda x: _loss(whole(x, counts))))(x)

    np.testing.assert_array_equal(gradient(["n"]), gradient([]))


@traced
@pytest.mark.parametrize("lib", [jaxcomm, HALVES])
def test_integer_leaves_travel_beside_differentiated_ones(stacked, mesh, x, lib):
    counts = np.arange(4 * 3, dtype=np.int32).reshape(4, 3)

    def program(x, counts):
        def loss(x):
            tree = {"x": x, "n": counts, "flag": counts > 3}
            for step in (
                lib.ring_shift, lib.all_gather, lib.psum_scatter, jaxcomm.pscan,
                jaxcomm.pmax,
            ):  # fmt: skip
                tree = step(tree, "i")
            product = jaxcomm.pprod(tree, "i")  # by gathering
            return (tree["x"] ** 2 + product["x"]).sum(), tree["n"]

        return jax.grad(loss, has_aux=True)(x)

    gradient, aux = stacked(mesh, program, x, counts)
    assert np.abs(gradient).sum() > 0
    shifted = np.roll(counts, 1, 0)  # all_gather then psum_scatter: 4 x its own
    np.testing.assert_array_equal(aux[0], (4 * np.cumsum(shifted, 0)).max(0))
