"""fsdp_scan against jax.lax.scan over whole parameters, on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import jaxcomm

LAYERS, WIDTH, ROWS = 3, 8, 8
P = jax.P
SPLIT = P(None, "i")
SPECS = {
    "up": P(None, None, "i"),
    "down": SPLIT,
    "bias": SPLIT,
    "scale": P(),
    "number": P(),
}


def product(x, w):
    return x @ w, None


def layer_with(shared):
    """Return a layer that uses a traced array of its surroundings."""

    def layer(carry, w):
        x, steps = carry
        h = jnp.tanh((x * shared) @ w["up"] * w["scale"]) @ w["down"] + w["bias"]
        y = {"size": (h**2).sum(axis=1), "number": w["number"] + steps}
        return (x + h, steps + 1), y

    return layer


def scan_over(axis, specs):
    return functools.partial(jaxcomm.fsdp_scan, axis_name=axis, specs=specs)


def value_and_gradients(scan, params, shared, x):
    """Return a loss of all that a scan returns, the integers beside it, gradients."""

    def loss(params, shared, x):
        (out, steps), y = scan(layer_with(shared), (x, jnp.int32(0)), params)
        return (out**2).sum() + jnp.sin(y["size"]).sum(), (steps, y["number"])

    differentiate = jax.value_and_grad(loss, (0, 1, 2), has_aux=True, allow_int=True)
    (value, integers), (of_params, *others) = differentiate(params, shared, x)
    del of_params["number"]
    return value, integers, (of_params, *others)


@pytest.mark.parametrize(
    ("check_vma", "layers"), [(True, LAYERS), (False, LAYERS), (True, 1)]
)
def test_result_and_gradients_are_those_of_whole_parameters(
    make_mesh, check_vma, layers
):
    normal = np.random.default_rng(0).standard_normal
    params = {
        "up": normal((layers, WIDTH, 2 * WIDTH)) / 4,
        "down": normal((layers, 2 * WIDTH, WIDTH)) / 4,
        "bias": normal((layers, WIDTH)),
        "scale": normal(layers),
    }
    params = jax.tree.map(jnp.float32, params) | {"number": jnp.arange(layers)}
    shared, x = jnp.full(WIDTH, 1.1), jnp.float32(normal((ROWS, WIDTH)))

    def program(params, shared, x):
        shared = jaxcomm.pcast(shared, "i", to="varying")
        scan = scan_over("i", SPECS)
        value, integers, gradients = value_and_gradients(scan, params, shared, x)
        of_params, of_shared, of_x = gradients
        if not check_vma:  # JAX sums nothing then.
            of_params["scale"] = jaxcomm.psum(of_params["scale"], "i")
        gradients = of_params, jaxcomm.psum(of_shared, "i"), of_x
        return jaxcomm.psum(value, "i"), jaxcomm.pmax(integers, "i"), gradients

    of_params = {k: v for k, v in SPECS.items() if k != "number"}
    program = jax.jit(
        jax.shard_map(
            program,
            mesh=make_mesh(i=4),
            in_specs=(SPECS, P(), P("i")),
            out_specs=(P(), P(), (of_params, P(), P("i"))),
            check_vma=check_vma,
        )
    )
    # Sums over rows in another order.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        program(params, shared, x),
        value_and_gradients(jax.lax.scan, params, shared, x),
    )
    compiled = program.lower(params, shared, x).compile()
    ours = jaxcomm.collectives_of(compiled).ours
    # Each pass gathers before its loop and in it. Each gradient is summed by itself.
    assert (ours["all_gather"], ours["reduce_scatter"]) == (4, 3)


def bodies_of(jaxpr):
    """Yield a program and all programs in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from bodies_of(inner)


def waiting_for(equation, body):
    """Return the equations of a body that cannot run before ``equation``."""
    known, found = set(equation.outvars), []
    for other in body.eqns:
        given = [x for x in other.invars if not isinstance(x, Literal)]
        if not known.isdisjoint(given):
            known.update(other.outvars)
            found.append(other)
    return found


def test_each_layer_computes_between_the_start_and_the_done_of_a_gather(make_mesh):
    """Forward and backward. XLA may put the start last if nothing needs it before."""

    def loss(x, w):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return scan_over("i", SPLIT)(layer, x, w)[0].sum()

    specs = P("i"), SPLIT
    program = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=make_mesh(i=4), in_specs=specs, out_specs=specs
    )
    jaxpr = jax.make_jaxpr(program)(jnp.ones((4, 4)), jnp.ones((3, 4, 4)))
    seen = []
    for body in bodies_of(jaxpr.jaxpr):
        of = {equation.primitive.name: equation for equation in body.eqns}
        products = [e for e in body.eqns if e.primitive.name == "dot_general"]
        if not products:
            continue
        start = of["jaxcomm_all_gather_start"]
        dones = [each for name, each in of.items() if name.endswith("_done")]
        seen.append((len(products), len(dones)))
        assert all(each in waiting_for(start, body) for each in products)
        # The sum of the gradients too waits for what is left of the backward pass.
        for each in products:
            assert all(done in waiting_for(each, body) for done in dones)
    # A layer is one product; its gradient is two more, which are summed.
    assert seen == [(1, 1), (3, 2)]


def temporaries(compile_options, scan, body, layers=8, width=64):
    """Return the temporaries of a gradient, in sizes of one layer's parameters."""

    def loss(params, x):
        return (scan(body, x, params)[0] ** 2).sum()

    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    gradient = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(SPLIT, P("i")), out_specs=SPLIT
    )
    up = jnp.zeros((layers, width, 4 * width))
    lowered = jax.jit(gradient).lower((up, up.mT), jnp.zeros((16, width)))
    memory = lowered.compile(compile_options).memory_analysis()
    return memory.temp_size_in_bytes / (2 * up[0].nbytes)


def test_memory_does_not_grow_with_the_layers(as_users_compile):
    """It is little more than of gathering in a checkpoint."""

    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def gathering(x, w):
        return layer(x, jaxcomm.all_gather(w, "i", tiled=True))

    ours, plain, kept = (
        temporaries(as_users_compile, *of)
        for of in (
            (scan_over("i", SPLIT), layer),
            (jax.lax.scan, jax.checkpoint(gathering)),
            (jax.lax.scan, gathering),
        )
    )
    # XLA:CPU computes at once what it can, and so has more alive than it must: a second
    # layer, and with jax 0.12 activations, of less than a 32nd of a layer.
    assert ours <= plain + 2 + 1 / 32
    # The gradient of a scan keeps what it gathers, without jax.checkpoint.
    assert kept > plain + 8 - 2


@pytest.mark.parametrize("axis", ["i", ("i", "j")])
def test_layers_may_have_keys_and_axes_of_several_kinds(make_mesh, axis):
    """Collectives over another axis, or a dimension that two axes split together."""
    w = jnp.sin(jnp.arange(LAYERS * WIDTH * WIDTH)).reshape(LAYERS, WIDTH, WIDTH)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    x = jnp.cos(jnp.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)
    of_w = P(None, "i", "j") if axis == "i" else P(None, axis)

    def layer(total):
        def apply(x, p):
            w, key = p
            keeps = jax.random.bernoulli(key, 0.5, (WIDTH,)).astype(x.dtype)
            return x + total(jnp.tanh(x @ w) @ w.mT) * keeps / WIDTH, None

        return apply

    def total(y):
        return jaxcomm.psum(y, "j") if axis == "i" else y

    def program(w, keys, x):
        return scan_over(axis, (of_w, P()))(layer(total), x, (w, keys))[0]

    f = jax.shard_map(
        program,
        mesh=make_mesh(i=2, j=2),
        in_specs=(of_w, P(), P(axis)),
        out_specs=P(axis),
    )
    found = jax.value_and_grad(lambda w: (jax.jit(f)(w, keys, x) ** 2).sum())(w)
    want = jax.value_and_grad(
        lambda w: (jax.lax.scan(layer(lambda y: y), x, (w, keys))[0] ** 2).sum()
    )(w)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, want
    )


W = np.ones((2, 4, 4), np.float32)
REFUSED = [
    # layer, params, specs, error, what it says
    (product, W, P(), ValueError, "split no parameter over"),
    (product, W, P("i"), ValueError, "which counts layers"),
    (product, W, P(None, ("i", "j")), ValueError, r"pass axis_name=\('i', 'j'\)"),
    (product, W, P(None, "i", None, None), ValueError, "4 entries"),
    (product, W, {"w": SPLIT}, ValueError, "specs do not fit params"),
    (product, W, "i", TypeError, "pass a jax.P"),
    (product, [W, W[:1]], SPLIT, ValueError, r"sizes \[1, 2\]"),
    (product, W[:0], SPLIT, ValueError, r"sizes \[0\]"),
    (product, W[0, 0, 0], SPLIT, ValueError, "is a scalar"),
    (product, W, SPLIT, ValueError, "is equal on all devices"),
    (lambda x, w: x @ w, W, SPLIT, TypeError, "return a pair"),
    (lambda x, w: ((x, x), None), W, SPLIT, TypeError, "of structure"),
    (
        lambda x, w: (x.astype("bfloat16"), None), W, SPLIT, TypeError,
        "of type bf16",
    ),
]  # fmt: skip


def scan_on(mesh, layer, specs, of_params):
    def scan(x, w):
        return jaxcomm.fsdp_scan(layer, x, w, "i", specs=specs)[0]

    return jax.shard_map(
        scan, mesh=mesh, in_specs=(P("i"), of_params), out_specs=P("i")
    )


@pytest.mark.parametrize(
    ("layer", "params", "specs", "error", "says"), REFUSED, ids=[r[4] for r in REFUSED]
)
def test_refuses(make_mesh, layer, params, specs, error, says):
    of_params = SPLIT if error is TypeError else P()
    scan = scan_on(make_mesh(i=2, j=2), layer, specs, of_params)
    with pytest.raises(error, match=says):
        jax.eval_shape(scan, jnp.ones((4, 4)), params)


def test_refuses_an_axis_that_is_not_bound():
    with pytest.raises(NameError, match=r"jaxcomm\.fsdp_scan inside jax\.shard_map"):
        scan_over("i", SPLIT)(product, jnp.ones(4), jnp.ones((2, 4)))


@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f])
def test_there_is_no_forward_mode(make_mesh, compiled):
    scan = scan_on(make_mesh(i=4), product, SPLIT, SPLIT)
    both = jnp.ones((4, 4)), jnp.ones((2, 4, 4))
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(compiled(scan), both, both)
