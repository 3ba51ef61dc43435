"""Blocks of three recurrent layers and one of attention, over packed documents."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.attention import save_attention, segment_ids_of, state_scan
from jaxcomm.attention.state import causal_halo

BLOCKS, RECURRENT, WIDTH, HEADS, VOCABULARY = 2, 3, 32, 2, 64
DOCUMENTS = [40, 1, 37, 19], [97]  # the lengths of those of each sequence
KERNEL = jaxcomm.attention.state.GatedDelta(chunk=8)


def norm(x):
    """Scale the last dimension to a mean square of one."""
    return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def heads_of(x, w):
    """Project tokens to queries, keys and values."""
    return (jnp.einsum("btd,dnh->btnh", x, w[name]) for name in "qkv")


def recurrent(x, w, tokens):
    """Add a gated delta rule, behind a causal convolution of four taps."""
    h = norm(x)
    before = causal_halo(h, "context", tokens, 3)
    h = h * w["taps"][0] + jnp.einsum("btwd,wd->btd", before, w["taps"][1:])
    q, k, v = heads_of(jax.nn.silu(h), w)
    k = norm(k) * k.shape[-1] ** -0.5  # of length 1
    gate, beta = -jax.nn.softplus(h @ w["gate"]), jax.nn.sigmoid(h @ w["beta"])
    out = state_scan(norm(q), k, v, gate, "context", tokens, kernel=KERNEL, beta=beta)
    return x + jnp.einsum("btnh,nhd->btd", out, w["o"])


def attention(x, w, tokens):
    """Add causal attention. The recurrent layers know the order: no positions."""
    q, k, v = heads_of(norm(x), w)
    out = jaxcomm.ring_attention(q, k, v, "context", tokens, is_causal=True)
    return x + jnp.einsum("btnh,nhd->btd", out, w["o"])


def loss_of(params, words, labels, tokens):
    """Return the sum over tokens that have a label, and how many these are."""

    def block(x, w):
        x, _ = jax.lax.scan(
            lambda x, w: (recurrent(x, w, tokens), None), x, w["recurrent"]
        )
        return attention(x, w["attention"], tokens), None

    # The way back computes a block again, but for what the layers kept.
    block = jax.checkpoint(block, policy=save_attention)
    x, _ = jax.lax.scan(block, params["embedding"][words], params["blocks"])
    scores = jax.nn.log_softmax(norm(x) @ params["embedding"].T)
    found = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return -jnp.where(labels < 0, 0, found).sum(), (labels >= 0).sum()


def make_params(key):
    """Draw the parameters: those of layers of a kind are one array for each name."""
    of_head = HEADS, WIDTH // HEADS
    shared = dict.fromkeys("qkv", (WIDTH, *of_head)) | {"o": (*of_head, WIDTH)}
    own = {"taps": (4, WIDTH), "gate": (WIDTH, HEADS), "beta": (WIDTH, HEADS)}
    keys = iter(jax.random.split(key, 2 * len(shared) + len(own) + 1))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / WIDTH**0.5

    return {
        "embedding": draw(VOCABULARY, WIDTH),
        "blocks": {
            "attention": {n: draw(BLOCKS, *s) for n, s in shared.items()},
            "recurrent": {
                n: draw(BLOCKS, RECURRENT, *s) for n, s in (shared | own).items()
            },
        },
    }


def train(size, params, words, ids):
    """Return the losses of ten steps on so many devices, and what they call."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((size,), ("context",), automatic, devices=jax.devices()[:size])
    layout = jaxcomm.Layout("zigzag", size, words.shape[1])
    labels, _ = layout.reorder(words, segment_ids=ids, shift=1)  # -1: there is none
    words, tokens = layout.reorder(words, segment_ids=ids)

    def local(params, words, labels, tokens):
        params = jaxcomm.pcast(params, "context", to="varying")
        total, count = jaxcomm.psum(loss_of(params, words, labels, tokens), "context")
        return total / count

    split = jax.P(None, "context")
    specs = jax.P(), split, split, split
    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
    step = jax.jit(jax.value_and_grad(loss)).lower(params, words, labels, tokens)
    step, losses = step.compile(), []
    for _ in range(10):
        loss, gradients = step(params, words, labels, tokens)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients)
        losses.append(float(loss))
    return losses, jaxcomm.collectives_of(step)


def main():
    """Train on 1, 2, 4 and 8 devices, and compare losses."""
    params = make_params(jax.random.key(0))
    ids = np.stack([segment_ids_of(lengths) for lengths in DOCUMENTS])
    words = np.random.default_rng(0).integers(0, VOCABULARY, ids.shape, np.int32)
    sizes = [size for size in (1, 2, 4, 8) if size <= len(jax.devices())]
    runs = [train(size, params, words, ids) for size in sizes]
    for i in range(0, 10, 3):
        of_each = [losses[i] for losses, _ in runs]
        assert max(of_each) - min(of_each) < 1e-4, of_each  # float32
        print(f"step {i + 1}: losses", *(f"{loss:.4f}" for loss in of_each))
    print(f"{sizes[-1]} devices: {runs[-1][1]}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
