"""Fully sharded data parallel training: parameters, gradients and Adam are split."""

import jax
import jax.numpy as jnp
import optax

import jaxcomm

LAYERS, WIDTH, BATCH = 6, 64, 32


def layer(x, w):
    """Compute one layer from its whole parameters."""
    norm = x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    hidden = jax.nn.gelu((norm * w["scale"]) @ w["up"] + w["bias"])
    x = x + hidden @ w["down"]
    return x, (x**2).mean()


def loss_of(scan, params, x, y):
    """Return the mean squared error; ``scan`` is ``jax.lax.scan`` or like it."""
    out, _ = scan(layer, x, params)
    return ((out - y) ** 2).mean()


def make_params(key):
    """Draw the parameters of all layers, stacked."""
    up, down = jax.random.split(key)
    return {
        "scale": jnp.ones((LAYERS, WIDTH)),
        "bias": jnp.zeros((LAYERS, 4 * WIDTH)),
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / WIDTH / LAYERS,
    }


def spec_of(leaf, size):
    """Split the longest dimension that devices divide, but for that of the layers."""
    possible = [d for d in range(1, leaf.ndim) if leaf.shape[d] % size == 0]
    if not possible:
        return jax.P()
    longest = max(possible, key=lambda d: leaf.shape[d])
    return jax.P(*[None] * longest, "data")


def make_step(mesh, specs, state_specs, optimizer):
    """Return a training step; each device updates its part of the parameters."""

    def scan(layer, x, params):
        return jaxcomm.fsdp_scan(layer, x, params, "data", specs=specs)

    def step(params, state, x, y):
        def mean_loss(params):
            return loss_of(scan, params, x, y) / jaxcomm.axis_size("data")

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jaxcomm.psum(loss, "data")

    split = jax.P("data")
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, split, split),
        out_specs=(specs, state_specs, jax.P()),
    )
    return jax.jit(sharded, donate_argnums=(0, 1))


def main():
    """Train on all devices and on one, and compare losses."""
    size = len(jax.devices())
    mesh = jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, y = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step_of_one_device(params, state):
        loss, gradients = jax.value_and_grad(
            lambda params: loss_of(jax.lax.scan, params, x, y)
        )(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def init():
        params = make_params(jax.random.key(0))
        return params, optimizer.init(params)

    # Adam remembers two numbers for each parameter, split as the parameters are.
    specs = jax.tree.map(lambda leaf: spec_of(leaf, size), jax.eval_shape(init))
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    ours = jax.jit(init, out_shardings=shardings)()  # whole on no device
    alone = jax.jit(init)()
    step = make_step(mesh, specs[0], specs[1], optimizer)
    compiled = step.lower(*ours, x, y).compile()
    for i in range(20):
        *ours, loss = step(*ours, x, y)
        *alone, expected = step_of_one_device(*alone)
        assert abs(float(loss - expected)) < 1e-4 * float(expected), (loss, expected)
        if i % 5 == 4:
            print(f"step {i + 1}: loss {loss:.4f}, on one device {expected:.4f}")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(alone))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(ours))
    print(f"parameters and Adam: {held / whole:.3f} of the bytes on each device")
    print(f"the step: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
