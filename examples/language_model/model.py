"""A byte-level causal transformer: RoPE, grouped key heads, RMSNorm, SwiGLU.

It never communicates. Who splits the sequence hands in the positions of the tokens it
holds and an ``attend`` that reaches the others, so one model serves the ring and the
reference on a single device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
_ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The size of the model.

    Attributes:
      layers: number of transformer blocks.
      width: features of a token; a multiple of 8, so that RoPE can halve a head.
      heads: query heads; they share the width.
      key_heads: heads of keys and values; each serves ``heads / key_heads`` queries.
    """

    layers: int
    width: int
    heads: int = 4
    key_heads: int = 2

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return 4 * self.width


def init_params(seed: int, config: ModelConfig):
    """Draw the initial parameters.

    Args:
      seed: of the random numbers.
      config: the size of the model.

    Returns:
      Pytree of float32 numpy arrays. Those under ``"blocks"`` have a leading dimension
      of ``config.layers``, for ``jax.lax.scan``.
    """
    width, hidden, size = config.width, config.hidden, config.head_size
    # numpy's, because compiling jax's takes longer than drawing the numbers.
    random = np.random.default_rng(seed)

    def normal(*shape, fan_in):
        return random.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

    def ones(*shape):
        return np.ones(shape, np.float32)

    layers, heads, key_heads = config.layers, config.heads, config.key_heads
    # What writes to the residual stream starts smaller the more blocks write to it.
    depth = 2 * layers
    blocks = {
        "attention_norm": ones(layers, width),
        "query": normal(layers, width, heads, size, fan_in=width),
        "key": normal(layers, width, key_heads, size, fan_in=width),
        "value": normal(layers, width, key_heads, size, fan_in=width),
        "out": normal(layers, heads, size, width, fan_in=width * depth),
        "mlp_norm": ones(layers, width),
        "gate": normal(layers, width, hidden, fan_in=width),
        "up": normal(layers, width, hidden, fan_in=width),
        "down": normal(layers, hidden, width, fan_in=hidden * depth),
    }
    return {
        # As large as what the blocks write: a hundred steps would not make it so.
        "embedding": normal(VOCABULARY, width, fan_in=1),
        "blocks": blocks,
        "norm": ones(width),
        # Small, so that the first loss is log(256).
        "head": normal(width, VOCABULARY, fan_in=width * 16),
    }


def count_params(params) -> int:
    """Return the number of scalars in a pytree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def apply(params, tokens, positions, attend, dtype="float32"):
    """Predict each token's successor.

    Layers alternate: the first sees a window, the second everything, and so on.

    Args:
      params: as :func:`init_params` makes them.
      tokens: int32 (B, T), bytes.
      positions: int32 (T,) or (B, T), where in the sequence they stand.
      attend: function of (B, T, N, D) queries, (B, T, K, D) keys and values, and
        whether the layer has a window. It returns causal attention over the whole
        sequence, (B, T, N, D).
      dtype: that the layers compute in; parameters may have another.

    Returns:
      float32 (B, T, 256), the logits.
    """
    params = jax.tree.map(lambda weight: weight.astype(dtype), params)
    rotation = _rotation(positions, params["blocks"]["query"].shape[-1])

    def project(x, weight):
        heads = weight.shape[1:]
        return (x @ weight.reshape(x.shape[1], -1)).reshape(*tokens.shape, *heads)

    def block(x, weights, is_windowed):
        y = _normalize(x, weights["attention_norm"])
        query, key, value = (project(y, weights[n]) for n in ("query", "key", "value"))
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        mixed = attend(query, key, value, is_windowed)
        x = x + mixed.reshape(x.shape) @ weights["out"].reshape(-1, x.shape[1])
        y = _normalize(x, weights["mlp_norm"])
        y = jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])
        return x + y @ weights["down"]

    def pair(x, weights):
        for layer in range(2):
            x = block(x, jax.tree.map(lambda w, at=layer: w[at], weights), layer == 0)
        return x, None

    blocks = params["blocks"]
    count = blocks["query"].shape[0]
    pairs = jax.tree.map(
        lambda w: w[: count // 2 * 2].reshape(count // 2, 2, *w.shape[1:]), blocks
    )
    # (B T, width): gradients of one matrix product, where XLA:CPU is slow at those of
    # a product that batch and tokens are both summed over.
    x = params["embedding"][tokens.reshape(-1)]
    x, _ = jax.lax.scan(pair, x, pairs)
    if count % 2:
        x = block(x, jax.tree.map(lambda w: w[-1], blocks), True)
    logits = _normalize(x, params["norm"]) @ params["head"]
    return logits.reshape(*tokens.shape, VOCABULARY).astype(jnp.float32)


def next_token_losses(params, tokens, targets, positions, attend, dtype="float32"):
    """Return the cross entropy of every target, in nats: float32 (B, T)."""
    logits = apply(params, tokens, positions, attend, dtype)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _normalize(x, weight):
    """RMSNorm. Source: Zhang and Sennrich, 2019."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * weight


def _rotation(positions, head_size):
    """Return cosines and sines of RoPE, (..., T, 1, D/2). Source: Su et al., 2021."""
    frequencies = _ROPE_BASE ** (-jnp.arange(0, head_size, 2) / head_size)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rotation):
    cosines, sines = rotation
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate(
        (first * cosines - second * sines, second * cosines + first * sines), axis=-1
    )
    return rotated.astype(x.dtype)
