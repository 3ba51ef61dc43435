"""A mixture of experts: tokens travel to their experts by ragged_all_to_all.

No expert has a capacity and no token is dropped. The messages have the sizes that the
router's choices give them. The buffer they arrive in has room for all tokens.
"""

import jax
import jax.numpy as jnp

import jaxcomm

TOKENS, WIDTH, HIDDEN, PER_DEVICE = 32, 16, 32, 2  # tokens and experts of a device


def expert_of(params, x):
    """Return each token's expert, and its probability."""
    scores = jax.nn.softmax(x @ params["router"])
    chosen = jnp.argmax(scores, axis=1)
    return chosen, jnp.take_along_axis(scores, chosen[:, None], axis=1)


def before(x, axis):
    """Return sums over the entries before each."""
    return jnp.cumsum(x, axis=axis) - x


def compute(params, x, sizes):
    """Apply experts to tokens that lie one expert after the other."""
    hidden = jax.nn.relu(jax.lax.ragged_dot(x, params["up"], sizes))
    return jax.lax.ragged_dot(hidden, params["down"], sizes)


def layer(params, x):
    """Send tokens to the devices of their experts, compute there, and send back.

    Args:
      params: ``router``, of all experts, and ``up`` and ``down`` of this device's.
      x: (tokens, width), of this device.
    """
    size, rank = jax.lax.axis_size("expert"), jax.lax.axis_index("expert")
    experts = size * PER_DEVICE
    chosen, probability = expert_of(params, x)
    order = jnp.argsort(chosen)
    counts = jnp.bincount(chosen, length=experts).astype(jnp.int32)

    # How many tokens each device has for each expert: all offsets follow from it.
    sizes = jaxcomm.all_gather(counts, "expert")
    here = jax.lax.dynamic_slice_in_dim(sizes, rank * PER_DEVICE, PER_DEVICE, axis=1)
    # A device keeps the tokens of an expert together, in the order of the senders.
    of_experts = sizes.sum(axis=0).reshape(size, PER_DEVICE)
    begins = before(of_experts, axis=1).reshape(experts) + before(sizes, axis=0)
    begins_here = before(here.sum(axis=0), axis=0) + before(here, axis=0)
    begins_there = jax.lax.dynamic_slice_in_dim(
        before(sizes, axis=1), rank * PER_DEVICE, PER_DEVICE, axis=1
    )
    room = jnp.zeros_like(x, shape=(size * len(x), WIDTH))
    there = before(counts, axis=0), counts, begins[rank], here.ravel()
    arrived = jaxcomm.ragged_all_to_all(x[order], room, *there, axis_name="expert")
    out = compute(params, arrived, here.sum(axis=0))
    back = begins_here.ravel(), here.ravel(), begins_there.ravel(), counts
    room = jnp.zeros_like(x)
    returned = jaxcomm.ragged_all_to_all(out, room, *back, axis_name="expert")
    return jnp.zeros_like(x).at[order].set(returned) * probability, counts


def on_one_device(params, x):
    """Compute the same with all experts here."""
    chosen, probability = expert_of(params, x)
    order = jnp.argsort(chosen)
    counts = jnp.bincount(chosen, length=len(params["up"])).astype(jnp.int32)
    out = compute(params, x[order], counts)
    return jnp.zeros_like(x).at[order].set(out) * probability


def main():
    """Compare results and gradients with those of one device."""
    size = len(jax.devices())
    mesh = jax.make_mesh((size,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)
    experts = size * PER_DEVICE
    params = {
        "router": jax.random.normal(keys[0], (WIDTH, experts)),
        "up": jax.random.normal(keys[1], (experts, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[2], (experts, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    x = jax.random.normal(keys[3], (size * TOKENS, WIDTH))

    def both(params, x):
        def loss(params):
            router = jaxcomm.pcast(params["router"], "expert", to="varying")
            out, counts = layer(params | {"router": router}, x)
            return (out**2).sum(), (out, counts)

        gradients, (out, counts) = jax.grad(loss, has_aux=True)(params)
        return gradients, out, jaxcomm.psum(counts, "expert")

    specs = {"router": jax.P(), "up": jax.P("expert"), "down": jax.P("expert")}
    split = jax.P("expert")
    in_specs, out_specs = (specs, split), (specs, split, jax.P())
    program = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    )
    gradients, out, counts = program(params, x)
    expected = on_one_device(params, x)
    wanted = jax.grad(lambda p: (on_one_device(p, x) ** 2).sum())(params)
    print(f"tokens of each expert: {counts}")
    for name, a, b in [("output", out, expected)] + [
        (f"gradient of {name}", gradients[name], wanted[name]) for name in params
    ]:
        error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert error < 1e-5, (name, error)  # float32
        print(f"{name}: equal to one device within 1e-05")
    print(jaxcomm.collectives_of(program.lower(params, x).compile()))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
