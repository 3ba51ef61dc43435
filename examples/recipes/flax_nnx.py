"""A flax nnx model over a split sequence: its layers attend around a ring."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxcomm

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 45, 64


class Block(nnx.Module):
    """An ordinary transformer layer, as it would be for one device."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List(nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Compute the layer: x is (batch, tokens, width)."""
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """A small language model."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))

    def __call__(self, words, positions):
        """Return scores (batch, tokens, vocabulary)."""
        x = self.words(words) + self.places(jnp.maximum(positions, 0))
        for block in self.blocks:
            x = block(x)
        return self.words.attend(x)


def loss_of(model, words, labels, tokens):
    """Return the summed loss of tokens, padding left out."""
    scores = model(words, tokens.positions)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.where(tokens.is_padding, 0, losses).sum()


def make_step(mesh, graph, optimizer):
    """Return a training step of parameters that all devices hold."""

    def step(params, state, words, labels, tokens):
        attend = jaxcomm.attention.attention_fn("context", tokens, is_causal=True)

        def mean_loss(params):
            params = jaxcomm.pcast(params, "context", to="varying")
            model = nnx.merge(graph, params)
            model.set_attributes(attention_fn=attend)  # of all layers that have one
            return loss_of(model, words, labels, tokens) / LENGTH

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jaxcomm.psum(loss, "context")

    split, whole = jax.P(None, "context"), jax.P()
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(whole, whole, split, split, split),
            out_specs=(whole, whole, whole),
        )
    )


def main():
    """Train on a ring and on one device, and compare losses."""
    size = len(jax.devices())
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((size,), ("context",), axis_types=automatic)
    graph, params = nnx.split(Model(nnx.Rngs(0)))
    words = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCABULARY)
    labels = jnp.roll(words, -1, axis=1)
    layout = jaxcomm.Layout("zigzag", size, LENGTH)
    batch, tokens = layout.reorder((words, labels))
    _, natural = jaxcomm.Layout("contiguous", 1, LENGTH).reorder(words)
    optimizer = optax.adam(3e-3)
    step = make_step(mesh, graph, optimizer)

    @jax.jit
    def step_of_one_device(params, state):
        def mean_loss(params):
            model = nnx.merge(graph, params)
            return loss_of(model, words, labels, natural) / LENGTH

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    alone = params, optimizer.init(params)
    ours = jax.device_put(alone, jax.NamedSharding(mesh, jax.P()))
    for i in range(10):
        *ours, loss = step(*ours, *batch, tokens)
        *alone, expected = step_of_one_device(*alone)
        assert abs(float(loss - expected)) < 1e-3, (loss, expected)  # Adam of float32
        if i % 3 == 0:
            print(f"step {i + 1}: loss {loss:.3f}, on one device {expected:.3f}")
    compiled = step.lower(*ours, *batch, tokens).compile()
    print(f"the step: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
