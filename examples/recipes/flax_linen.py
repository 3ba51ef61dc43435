"""A flax linen model over a split sequence: its layers attend around a ring."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen

import jaxcomm

WIDTH, HEADS, LENGTH = 32, 4, 45


class Block(linen.Module):
    """A transformer layer whose attention may be another function."""

    attention_fn: Callable = linen.dot_product_attention

    @linen.compact
    def __call__(self, x, mask=None):
        """Compute the layer: x is (batch, tokens, width)."""
        attention = linen.MultiHeadDotProductAttention(
            HEADS, attention_fn=self.attention_fn
        )
        x = x + attention(linen.RMSNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(4 * WIDTH)(linen.RMSNorm()(x)))
        return x + linen.Dense(WIDTH)(hidden)


def loss_of(out, target, tokens):
    """Return the summed error of tokens, padding left out."""
    return jnp.where(tokens.is_padding[..., None], 0, (out - target) ** 2).sum()


def make_loss(mesh):
    """Return the loss of parameters that all devices hold."""

    def local(params, x, target, tokens):
        params = jaxcomm.pcast(params, "context", to="varying")
        # Pass no causal mask: one of this device's tokens alone would be wrong.
        attend = jaxcomm.attention.attention_fn("context", tokens, is_causal=True)
        out = Block(attend).apply(params, x)
        loss = loss_of(out, target, tokens)
        return jaxcomm.psum(loss, "context") / LENGTH

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
    # The parameters do not depend on the attention: make them outside of shard_map.
    params = Block().init(jax.random.key(1), x)
    layout = jaxcomm.Layout("zigzag", size, LENGTH)
    batch, tokens = layout.reorder((x, target))
    mask = linen.make_causal_mask(x[..., 0])
    _, natural = jaxcomm.Layout("contiguous", 1, LENGTH).reorder(x)

    def on_one_device(params):
        return loss_of(Block().apply(params, x, mask), target, natural) / LENGTH

    step = jax.jit(jax.value_and_grad(make_loss(mesh)))
    alone = jax.jit(jax.value_and_grad(on_one_device))
    theirs, ours = params, jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    for i in range(10):
        loss, gradients = step(ours, *batch, tokens)
        expected, expected_gradients = alone(theirs)
        ours = jax.tree.map(lambda p, g: p - 2e-3 * g, ours, gradients)
        theirs = jax.tree.map(lambda p, g: p - 2e-3 * g, theirs, expected_gradients)
        assert abs(float(loss - expected)) < 1e-5 * float(expected), (loss, expected)
        if i % 3 == 0:
            print(f"step {i + 1}: loss {loss:.3f}, on one device {expected:.3f}")
    compiled = step.lower(ours, *batch, tokens).compile()
    print(f"the step: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
