"""An equinox layer over a split sequence: it attends around a ring."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxcomm

WIDTH, HEADS, LENGTH = 32, 4, 45


class Block(eqx.Module):
    """An ordinary transformer layer, of one sequence."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        attention, mlp = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, key=mlp)

    def __call__(self, x, attend):
        """Compute the layer: x is (tokens, width), as equinox has no batches."""
        h = jax.vmap(self.norm)(x)
        x = x + attend(self.attention, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


def loss_of(block, x, target, tokens, attend):
    """Return the summed error of a sequence, padding left out."""
    error = (block(x, attend) - target) ** 2
    return jnp.where(tokens.is_padding[:, None], 0, error).sum()


def whole_sequence(layer, h):
    """Attend on one device."""
    return layer(h, h, h, jnp.tril(jnp.ones((len(h), len(h)), bool)))


def around_the_ring(layer, h, attend):
    """Attend with the layer's projections: what each device holds of a sequence."""

    def heads_of(project):
        return jax.vmap(project)(h).reshape(len(h), HEADS, -1)

    projections = layer.query_proj, layer.key_proj, layer.value_proj
    out = attend(*map(heads_of, projections))
    return jax.vmap(layer.output_proj)(out.reshape(len(h), -1))


def make_loss(mesh, static):
    """Return the loss of a batch, for parameters that all devices hold."""

    def local(params, x, target, tokens):
        # A module has functions among its leaves. What travels, and what pcast takes,
        # are its arrays.
        block = eqx.combine(jaxcomm.pcast(params, "context", to="varying"), static)

        def of_sequence(x, target, tokens):
            ring = functools.partial(
                jaxcomm.ring_attention,
                axis_name="context",
                tokens=tokens,
                is_causal=True,
            )
            attend = functools.partial(around_the_ring, attend=ring)
            return loss_of(block, x, target, tokens, attend)

        losses = jax.vmap(of_sequence)(x, target, tokens)
        return jaxcomm.psum(losses.sum(), "context") / LENGTH

    split = jax.P(None, "context")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(), split, split, split), out_specs=jax.P()
    )


def main():
    """Train on a ring and on one device, and compare losses."""
    size = len(jax.devices())
    mesh = jax.make_mesh(
        (size,), ("context",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
    target = jnp.cumsum(x, axis=1) / 8
    params, static = eqx.partition(Block(jax.random.key(1)), eqx.is_array)
    layout = jaxcomm.Layout("zigzag", size, LENGTH)
    batch, tokens = layout.reorder((x, target))
    _, natural = jaxcomm.Layout("contiguous", 1, LENGTH).reorder(x)

    def on_one_device(params):
        def of_sequence(x, target, tokens):
            block = eqx.combine(params, static)
            return loss_of(block, x, target, tokens, whole_sequence)

        return jax.vmap(of_sequence)(x, target, natural).sum() / LENGTH

    step = jax.jit(jax.value_and_grad(make_loss(mesh, static)))
    alone = jax.jit(jax.value_and_grad(on_one_device))
    theirs, ours = params, jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    for i in range(10):
        loss, gradients = step(ours, *batch, tokens)
        expected, expected_gradients = alone(theirs)
        ours = jax.tree.map(lambda p, g: p - 5e-3 * g, ours, gradients)
        theirs = jax.tree.map(lambda p, g: p - 5e-3 * g, theirs, expected_gradients)
        assert abs(float(loss - expected)) < 1e-5 * float(expected), (loss, expected)
        if i % 3 == 0:
            print(f"step {i + 1}: loss {loss:.3f}, on one device {expected:.3f}")
    compiled = step.lower(ours, *batch, tokens).compile()
    print(f"the step: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
