"""Data parallel training with optax: one call sums all gradients."""

import jax
import jax.numpy as jnp
import optax

import jaxcomm


def loss_of(params, x, y):
    """Return the mean squared error of a small network."""
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def make_params(key, width=32):
    """Draw the parameters, which every device holds whole."""
    keys = jax.random.split(key)
    return {
        "in": jax.random.normal(keys[0], (4, width)) / 2,
        "bias": jnp.zeros(width),
        "out": jax.random.normal(keys[1], (width, 1)) / width**0.5,
    }


def make_step(mesh, optimizer):
    """Return a training step: the batch is split over the axis ``data``."""

    def step(params, state, x, y):
        def mean_loss(params):
            # From here on the parameters differ between devices, as far as JAX knows.
            # The gradient of the cast is jaxcomm's sum, one call for all leaves.
            params = jaxcomm.pcast(params, "data", to="varying")
            return loss_of(params, x, y) / jax.lax.axis_size("data")

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jaxcomm.psum(loss, "data")

    split, whole = jax.P("data"), jax.P()
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(whole, whole, split, split),
            out_specs=(whole, whole, whole),
        )
    )


def twice_summed(mesh):
    """Return the mistake: a mean of gradients that JAX has summed already.

    Without the cast JAX sums them by XLA's all-reduce. Their mean is then still the
    sum, so N devices train with N times the gradient. Adam hides it, SGD diverges.
    """

    def gradients(params, x, y):
        return jaxcomm.pmean(jax.grad(loss_of)(params, x, y), "data")

    split, whole = jax.P("data"), jax.P()
    return jax.jit(
        jax.shard_map(
            gradients, mesh=mesh, in_specs=(whole, split, split), out_specs=whole
        )
    )


def main():
    """Train on all devices and on one, and compare."""
    size = len(jax.devices())
    mesh = jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = make_params(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (64, 4))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    optimizer = optax.adam(1e-2)
    step = make_step(mesh, optimizer)

    @jax.jit
    def step_of_one_device(params, state):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    alone = params, optimizer.init(params)
    ours = jax.device_put(alone, jax.NamedSharding(mesh, jax.P()))
    largest = 0.0
    for i in range(30):
        *ours, loss = step(*ours, x, y)
        *alone, expected = step_of_one_device(*alone)
        largest = max(largest, abs(float(loss - expected)))
        if i % 10 == 9:
            print(f"step {i + 1}: loss {loss:.4f}, on one device {expected:.4f}")
    assert largest < 1e-5, largest  # float32 sums in another order

    compiled = step.lower(*ours, x, y).compile()
    print(f"the step: {jaxcomm.collectives_of(compiled)}")
    wrong = twice_summed(mesh)
    ratio = wrong(params, x, y)["out"] / jax.grad(loss_of)(params, x, y)["out"]
    assert jnp.allclose(ratio, size, rtol=1e-3), ratio
    counts = jaxcomm.collectives_of(wrong.lower(params, x, y).compile())
    print(f"pmean without pcast: {ratio.mean():.1f} times the gradient, {counts}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
