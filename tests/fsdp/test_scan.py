"""fsdp_scan against jax.lax.scan over whole parameters, on one device."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import jaxcomm
from fsdp import memory

LAYERS, WIDTH, ROWS = 3, 8, 8
P = jax.P
SPECS = {
    "up": P(None, None, "i"),
    "down": P(None, "i"),
    "bias": P(None, "i"),
    "scale": P(),
    "number": P(),
}


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(i=4)


@pytest.fixture
def params():
    normal = np.random.default_rng(0).standard_normal
    return {
        "up": np.float32(normal((LAYERS, WIDTH, 2 * WIDTH)) / 4),
        "down": np.float32(normal((LAYERS, 2 * WIDTH, WIDTH)) / 4),
        "bias": np.float32(normal((LAYERS, WIDTH))),
        "scale": np.float32(normal(LAYERS)),
        "number": np.arange(LAYERS, dtype=np.int32),
    }


@pytest.fixture
def x():
    return np.float32(np.random.default_rng(1).standard_normal((ROWS, WIDTH)))


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


def loss_of(scan, params, shared, x):
    """Return a loss of all that a scan returns, and the integers beside it."""
    (out, steps), y = scan(layer_with(shared), (x, jnp.int32(0)), params)
    return (out**2).sum() + jnp.sin(y["size"]).sum(), (steps, y["number"])


def scan_over(axis="i", specs=SPECS, **options):
    return lambda layer, init, params: jaxcomm.fsdp_scan(
        layer, init, params, axis, specs=specs, **options
    )


def on_mesh(mesh, scan, check_vma):
    """Return the program for the loss of all devices and its gradients."""

    def program(params, shared, x):
        def loss(params, shared, x):
            shared = jaxcomm.pcast(shared, "i", to="varying")
            return loss_of(scan, params, shared, x)

        found, gradients = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True, allow_int=True
        )(params, shared, x)
        (value, integers), (of_params, of_shared, of_x) = found, gradients
        of_params = {k: v for k, v in of_params.items() if k != "number"}
        value = jaxcomm.psum(value, "i")
        if not check_vma:  # JAX sums nothing then.
            of_params["scale"] = jaxcomm.psum(of_params["scale"], "i")
            of_shared = jaxcomm.psum(of_shared, "i")
        integers = jaxcomm.pmax(integers, "i")
        return value, integers, (of_params, of_shared, of_x)

    of_params = {k: v for k, v in SPECS.items() if k != "number"}
    return jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(SPECS, P(), P("i")),
            out_specs=(P(), P(), (of_params, P(), P("i"))),
            check_vma=check_vma,
        )
    )


def expected(params, shared, x):
    found, (of_params, *others) = jax.value_and_grad(
        functools.partial(loss_of, jax.lax.scan),
        argnums=(0, 1, 2),
        has_aux=True,
        allow_int=True,
    )(params, shared, x)
    of_params = {k: v for k, v in of_params.items() if k != "number"}
    return *found, (of_params, *others)


@pytest.mark.parametrize(
    ("check_vma", "layers"), [(True, LAYERS), (False, LAYERS), (True, 1)]
)
def test_result_and_gradients_are_those_of_whole_parameters(
    mesh, params, x, check_vma, layers
):
    params = jax.tree.map(lambda leaf: leaf[:layers], params)
    shared = np.float32(1.1) * np.ones(WIDTH, np.float32)
    program = on_mesh(mesh, scan_over(), check_vma)
    found = program(params, shared, x)
    # Sums over rows in another order.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        found,
        expected(jax.tree.map(jnp.asarray, params), shared, jnp.asarray(x)),
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


def test_each_layer_computes_between_the_start_and_the_done_of_a_gather(mesh):
    """Forward and backward. XLA may put the start last if nothing needs it before."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(x, w):
        return jaxcomm.fsdp_scan(layer, x, w, "i", specs=P(None, "i"))[0].sum()

    specs = P("i"), P(None, "i")
    program = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs
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


def test_two_axes_split_a_dimension_together(make_mesh):
    mesh = make_mesh(i=2, j=2)
    w = jnp.arange(2 * 4 * 4, dtype=jnp.float32).reshape(2, 4, 4) / 40
    x = jnp.ones((4, 4))
    specs = P(None, ("i", "j"))

    def layer(x, w):
        return jnp.sin(x @ w), None

    def loss(w, x):
        out, _ = jaxcomm.fsdp_scan(layer, x, w, ("i", "j"), specs=specs)
        return (out**2).sum()

    f = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(specs, P(("i", "j"))), out_specs=specs
    )
    want = jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).sum())(w)
    np.testing.assert_allclose(jax.jit(f)(w, x), want, atol=2e-5)


def test_memory_does_not_grow_with_the_layers(as_users_compile):
    found = memory.measure(**as_users_compile)
    # XLA:CPU computes at once what it can, and so has more alive than it must: a second
    # layer, and with jax 0.12 activations, of less than a 32nd of a layer.
    assert found["ours"] <= found["plain"] + 2 + 1 / 32
    # The gradient of a scan keeps what it gathers, without jax.checkpoint.
    assert found["kept"] > found["plain"] + memory.LAYERS - 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.multiprocess
def test_memory_is_a_layer_more_than_of_gathering_in_a_checkpoint():
    flags = (
        "--xla_force_host_platform_device_count=8 "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    done = subprocess.run(
        [sys.executable, memory.__file__],
        env=dict(os.environ, XLA_FLAGS=flags),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ours"] <= found["plain"] + 1


def test_layers_may_have_keys_and_collectives_over_another_axis(make_mesh):
    mesh = make_mesh(i=2, j=2)
    w = jnp.sin(jnp.arange(LAYERS * WIDTH * WIDTH)).reshape(LAYERS, WIDTH, WIDTH)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    x = jnp.cos(jnp.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)

    def layer(total):
        def apply(x, p):
            w, key = p
            keeps = jax.random.bernoulli(key, 0.5, (WIDTH,)).astype(x.dtype)
            y = total(jnp.tanh(x @ w) @ jnp.swapaxes(w, 0, 1))
            return x + y * keeps / WIDTH, None

        return apply

    def program(w, keys, x):
        specs = P(None, "i", "j"), P()
        total = layer(lambda y: jaxcomm.psum(y, "j"))
        return jaxcomm.fsdp_scan(total, x, (w, keys), "i", specs=specs)[0]

    f = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(P(None, "i", "j"), P(), P("i")),
        out_specs=P("i"),
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
    (product, W, {"w": P(None, "i")}, ValueError, "specs do not fit params"),
    (product, W, "i", TypeError, "pass a jax.P"),
    (product, [W, W[:1]], P(None, "i"), ValueError, r"sizes \[1, 2\]"),
    (product, W[:0], P(None, "i"), ValueError, r"sizes \[0\]"),
    (product, W[0, 0, 0], P(None, "i"), ValueError, "is a scalar"),
    (product, W, P(None, "i"), ValueError, "is equal on all devices"),
    (lambda x, w: x @ w, W, P(None, "i"), TypeError, "return a pair"),
    (lambda x, w: ((x, x), None), W, P(None, "i"), TypeError, "of structure"),
    (
        lambda x, w: (x.astype("bfloat16"), None), W, P(None, "i"), TypeError,
        "of type bf16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "params", "specs", "error", "says"), REFUSED, ids=[r[4] for r in REFUSED]
)
def test_refuses(make_mesh, layer, params, specs, error, says):
    def scan(x, w):
        return jaxcomm.fsdp_scan(layer, x, w, "i", specs=specs)[0]

    is_split = error is TypeError
    f = jax.shard_map(
        scan,
        mesh=make_mesh(i=2, j=2),
        in_specs=(P("i"), P(None, "i") if is_split else P()),
        out_specs=P("i"),
    )
    with pytest.raises(error, match=says):
        jax.eval_shape(f, jnp.ones((4, 4)), params)


def test_refuses_an_axis_that_is_not_bound():
    with pytest.raises(NameError, match=r"jaxcomm\.fsdp_scan inside jax\.shard_map"):
        jaxcomm.fsdp_scan(
            product, jnp.ones(4), jnp.ones((2, 4)), "i", specs=P(None, "i")
        )


@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f])
def test_there_is_no_forward_mode(mesh, compiled):
    split = P(None, "i")

    def scan(x, w):
        return jaxcomm.fsdp_scan(product, x, w, "i", specs=split)[0]

    f = jax.shard_map(scan, mesh=mesh, in_specs=(P("i"), split), out_specs=P("i"))
    both = jnp.ones((4, 4)), jnp.ones((2, 4, 4))
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(compiled(f), both, both)
