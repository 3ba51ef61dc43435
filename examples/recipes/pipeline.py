"""Pipeline parallel layers: micro-batches travel from stage to stage by ppermute."""

import jax
import jax.numpy as jnp

import jaxcomm

MICRO_BATCHES, ROWS, WIDTH = 12, 4, 16


def stage(w, x):
    """Compute the layers of one device."""
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def pipeline(w, batches):
    """Run all micro-batches through the stages of the axis ``stage`` (GPipe).

    Args:
      w: parameters of this device's stage.
      batches: (micro-batches, rows, width), equal on all devices.

    Returns:
      (micro-batches, rows, width), the results on the last stage. Other stages return
      zeros.
    """
    size, rank = jax.lax.axis_size("stage"), jax.lax.axis_index("stage")
    count = len(batches)
    onward = [(i, i + 1) for i in range(size - 1)]

    def tick(carry, i):
        arrived, results = carry
        # The first stage begins a micro-batch in each tick until none is left.
        fresh = batches[jnp.minimum(i, count - 1)]
        out = stage(w, jnp.where(rank == 0, fresh, arrived))
        # The last stage ends one in each tick, once the pipeline is full.
        done = i - (size - 1)
        is_result = (rank == size - 1) & (done >= 0)
        results = results.at[jnp.maximum(done, 0)].add(jnp.where(is_result, out, 0))
        return (jaxcomm.ppermute(out, "stage", onward), results), None

    # A loop's carry keeps its type. What the ticks make of it differs between devices,
    # so what it starts with must be typed likewise. It moves nothing.
    start = jnp.zeros_like(batches[0]), jnp.zeros_like(batches)
    start = jaxcomm.pcast(start, "stage", to="varying")
    (_, results), _ = jax.lax.scan(tick, start, jnp.arange(count + size - 1))
    return results


def loss_of_pipeline(w, batches, targets):
    """Return the loss, on all devices."""
    w = jax.tree.map(lambda leaf: leaf[0], w)
    results = pipeline(w, batches)
    is_last = jax.lax.axis_index("stage") == jax.lax.axis_size("stage") - 1
    loss = jnp.where(is_last, ((results - targets) ** 2).mean(), 0)
    return jaxcomm.psum(loss, "stage")


def loss_of_one_device(w, batches, targets):
    """Return the loss, with all stages one after the other."""

    def apply(x, w):
        return stage(w, x), None

    results, _ = jax.lax.scan(apply, batches, w)
    return ((results - targets) ** 2).mean()


def main():
    """Train both ways, and compare losses."""
    size = len(jax.devices())
    mesh = jax.make_mesh((size,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (size, WIDTH, WIDTH)
    w = {
        "in": jax.random.normal(keys[0], shape) / WIDTH**0.5,
        "out": jax.random.normal(keys[1], shape) / WIDTH**0.5 / size,
    }
    batches = jax.random.normal(keys[2], (MICRO_BATCHES, ROWS, WIDTH))
    targets = jnp.sin(2 * batches)
    split = jax.P("stage")
    value_and_grad = jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss_of_pipeline),
            mesh=mesh,
            in_specs=(split, jax.P(), jax.P()),
            out_specs=(jax.P(), split),
        )
    )
    alone = jax.jit(jax.value_and_grad(loss_of_one_device))
    expected_w = w
    for i in range(30):
        loss, gradients = value_and_grad(w, batches, targets)
        expected, expected_gradients = alone(expected_w, batches, targets)
        w, expected_w = jax.tree.map(
            lambda p, g: p - 0.2 * g, (w, expected_w), (gradients, expected_gradients)
        )
        assert abs(float(loss - expected)) < 1e-5, (loss, expected)  # float32
        if i % 10 == 9:
            print(f"step {i + 1}: loss {loss:.4f}, on one device {expected:.4f}")
    ticks = MICRO_BATCHES + size - 1
    print(f"{size} stages, {MICRO_BATCHES} micro-batches: busy in", end=" ")
    print(f"{MICRO_BATCHES} of {ticks} ticks, {MICRO_BATCHES / ticks:.0%}")
    compiled = value_and_grad.lower(w, batches, targets).compile()
    print(f"the step: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
