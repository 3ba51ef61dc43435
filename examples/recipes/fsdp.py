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
    return x + hidden @ w["down"]


def scan_whole(x, params):
    """Compute all layers on a device that holds all parameters."""
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]


def gather(params, i):
    """Begin to gather the parameters of layer i, of which this device has a part."""
    mine = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, i, 0, False), params)
    return jaxcomm.all_gather_start(mine, "data", tiled=True)


@jax.custom_vjp
def scan_split(x, params):
    """Compute all layers, and gather the next layer while one computes."""
    return forward(x, params)[0]


def forward(x, params):
    """Return the last layer's output, and what the backward pass needs."""

    def step(carry, i):
        x, w = carry
        # The last layer gathers itself again: a branch could not overlap.
        arriving = gather(params, jnp.minimum(i + 1, LAYERS - 1))
        out = layer(arriving.then(x), w)
        return (out, arriving.done(after=out)), x

    carry = x, gather(params, 0).done()
    (out, _), inputs = jax.lax.scan(step, carry, jnp.arange(LAYERS))
    return out, (inputs, params)


def backward(kept, ct):
    """Compute each layer again, and gather the layer before it meanwhile.

    ``jax.grad`` of the loop would keep the gathered parameters of all layers.
    """
    inputs, params = kept

    def step(carry, given):
        ct, w = carry
        i, x = given
        arriving = gather(params, jnp.maximum(i - 1, 0))
        _, pullback = jax.vjp(layer, arriving.then(x), w)
        ct, gradient = pullback(ct)
        # Each device keeps its part of the sum.
        part = jaxcomm.psum_scatter(gradient, "data", tiled=True)
        return (ct, arriving.done(after=(ct, part))), part

    carry = ct, gather(params, LAYERS - 1).done()
    given = jnp.arange(LAYERS), inputs
    (ct, _), gradients = jax.lax.scan(step, carry, given, reverse=True)
    return ct, gradients


scan_split.defvjp(forward, backward)


def loss_of(scan, params, x, y):
    """Return the mean squared error; ``scan`` is one of the two above."""
    return ((scan(x, params) - y) ** 2).mean()


def make_params(key):
    """Draw the parameters of all layers, stacked."""
    up, down = jax.random.split(key)
    return {
        "scale": jnp.ones((LAYERS, WIDTH)),
        "bias": jnp.zeros((LAYERS, 4 * WIDTH)),
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / WIDTH / LAYERS,
    }


def make_step(mesh, specs, state_specs, optimizer):
    """Return a training step; each device updates its part of the parameters."""

    def step(params, state, x, y):
        def mean_loss(params):
            return loss_of(scan_split, params, x, y) / jax.lax.axis_size("data")

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
            lambda params: loss_of(scan_whole, params, x, y)
        )(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def init():
        params = make_params(jax.random.key(0))
        return params, optimizer.init(params)

    # Adam remembers two numbers for each parameter, split as the parameters are.
    specs = jax.tree.map(
        lambda leaf: jax.P(None, "data") if leaf.ndim else jax.P(), jax.eval_shape(init)
    )
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
