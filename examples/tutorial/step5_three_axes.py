"""A small GPT on three axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxcomm

BATCH, LENGTH, WIDTH, LAYERS, HEAD_SIZE = 12, 256, 64, 2, 16
jax.config.update("jax_num_cpu_devices", 8)  # on GPUs leave this out
auto = (jax.sharding.AxisType.Auto,) * 3
shape = (jax.device_count() // 4, 2, 2)
mesh = jax.make_mesh(shape, ("data", "model", "context"), axis_types=auto)
jax.set_mesh(mesh)
rows = jax.P("data", "context")


def make_batch(step):
    """Return words and labels (BATCH, LENGTH): each document is a times table."""
    random = np.random.default_rng(step)
    text = ""
    while len(text) <= BATCH * LENGTH:
        number, rows = random.integers(2, 10), random.integers(3, 40)
        text += " ".join(str(number * i) for i in range(1, rows)) + "\n"
    words = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    ends = words == ord("\n")  # of documents: they have no next word
    labels = np.where(ends[:-1], -1, words[1:])
    documents = (np.cumsum(ends) - ends)[:-1]
    batch = {"words": words[:-1], "labels": labels, "documents": documents}
    shape = BATCH, LENGTH
    return {name: np.resize(x, shape) for name, x in batch.items()}


class Block(nnx.Module):
    """Attention, then two dense layers."""

    def __init__(self, key):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(key))
        self.query, self.key = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.value, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x, attend):
        """Compute the layer: x is (batch, tokens, width)."""
        h = norm(x)
        q, k, v = (
            layer(h).reshape(*h.shape[:2], -1, HEAD_SIZE)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(attend(q, k, v).reshape(*h.shape[:2], -1))
        h = norm(x)
        return x + self.down(nnx.gelu(self.up(h)))


def norm(x):
    """Scale each token to a mean square of one."""
    return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


class GPT(nnx.Module):
    """A language model of bytes."""

    def __init__(self, rngs):
        self.words = nnx.Embed(128, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        keys = jax.random.split(jax.random.key(0), LAYERS)
        self.blocks = nnx.vmap(Block)(keys)

    def __call__(self, words, positions, attend):
        """Return scores (batch, tokens, 128)."""
        x = self.words(words) + self.places(positions)
        graph, params = nnx.split(self.blocks)

        def layer(x, params):
            return nnx.merge(graph, params)(x, attend), None

        layer = jax.checkpoint(layer, policy=jaxcomm.attention.save_attention)
        x, _ = jax.lax.scan(layer, x, params)
        return self.words.attend(norm(x))


def spec_of(path, parameter):
    """Return how "model" splits a parameter: by heads and by hidden units."""
    names = {getattr(entry, "key", None) for entry in path}
    if names & {"query", "key", "value", "up"}:
        return jax.P(None, None, "model")  # (layers, from, to)
    return jax.P(None, "model") if names & {"out", "down"} else jax.P()


graph, params = nnx.split(GPT(nnx.Rngs(0)))
specs = jax.tree.map_with_path(spec_of, params)
params = jax.device_put(params, specs)


def loss_of(params, batch):
    """Return the mean loss of a token."""
    attend = functools.partial(
        jaxcomm.dot_product_attention,
        sharding=jax.P("data", "context", "model"),
        is_causal=True,
        segment_ids=batch["documents"],
    )
    model, labels = nnx.merge(graph, params), batch["labels"]
    scores = jax.nn.log_softmax(model(batch["words"], jnp.arange(LENGTH), attend))
    losses = -jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return losses.sum(where=labels >= 0) / (BATCH * LENGTH)


@jax.jit
def step(params, batch):
    """Return the parameters after a step of gradient descent, and the loss."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


for i in range(20):
    params, loss = step(params, jax.device_put(make_batch(i), rows))
    if i in (0, 9, 19):
        print(f"step {i + 1}: loss {loss:.3f}")
