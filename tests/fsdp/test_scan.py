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


@pytest.mark.parametrize("check_vma", [True, False])
def test_result_and_gradients_are_those_of_whole_parameters(mesh, params, x, check_vma):
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


def test_one_layer_is_scanned(mesh, params, x):
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), params)
    shared = jnp.ones(WIDTH)
    found = on_mesh(mesh, scan_over(), True)(one, shared, x)
    want = expected(one, shared, jnp.asarray(x))
    np.testing.assert_allclose(found[0], want[0], rtol=2e-5)
    np.testing.assert_allclose(found[2][0]["up"], want[2][0]["up"], atol=2e-5)


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_layers_may_have_keys_and_collectives_over_another_axis(make_mesh, check_vma):
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
        check_vma=check_vma,
    )
    found = jax.value_and_grad(lambda w: (jax.jit(f)(w, keys, x) ** 2).sum())(w)
    want = jax.value_and_grad(
        lambda w: (jax.lax.scan(layer(lambda y: y), x, (w, keys))[0] ** 2).sum()
    )(w)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, want
    )


def product(x, w):
    return x @ w, None


@pytest.mark.parametrize(
    ("layer", "specs", "error", "says"),
    [
        (product, P(), ValueError, "split no parameter over"),
        (product, P("i"), ValueError, "which counts layers"),
        (product, P(None, ("i", "j")), ValueError, r"pass axis_name=\('i', 'j'\)"),
        (product, P(None, "i", None, None), ValueError, "4 entries"),
        (product, {"w": P(None, "i")}, ValueError, "specs do not fit params"),
        (product, "i", TypeError, "pass a jax.P"),
        (lambda x, w: x @ w, P(None, "i"), TypeError, "return a pair"),
        (lambda x, w: ((x, x), None), P(None, "i"), TypeError, "of structure"),
        (
            lambda x, w: (x.astype("bfloat16"), None),
            P(None, "i"),
            TypeError,
            "of type bf16",
        ),
    ],
)
def test_refuses(make_mesh, layer, specs, error, says):
    def scan(x, w):
        return jaxcomm.fsdp_scan(layer, x, w, "i", specs=specs)[0]

    f = jax.shard_map(
        scan,
        mesh=make_mesh(i=2, j=2),
        in_specs=(P("i"), P(None, "i")),
        out_specs=P("i"),
    )
    with pytest.raises(error, match=says):
        f(jnp.ones((4, 4)), jnp.ones((2, 4, 4)))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"a": np.ones((2, 4)), "b": np.ones((3, 4))}, r"sizes \[2, 3\]"),
        ({"a": np.ones((0, 4))}, r"sizes \[0\]"),
        ({"a": np.float32(1)}, "is a scalar"),
    ],
)
def test_refuses_leaves_that_count_other_layers(mesh, params, says):
    def scan(x, w):
        return jaxcomm.fsdp_scan(product, x, w, "i", specs=P(None, "i"))[0]

    f = jax.shard_map(scan, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=says):
        f(jnp.ones((4, 4)), params)


def test_refuses_parameters_that_are_not_split(mesh):
    def scan(x, w):
        return jaxcomm.fsdp_scan(product, x, w, "i", specs=P(None, "i"))[0]

    f = jax.shard_map(scan, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    with pytest.raises(ValueError, match="is equal on all devices"):
        f(jnp.ones((4, 4)), jnp.ones((2, 4, 4)))


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
