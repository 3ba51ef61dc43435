"""Let the trained model write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from language_model import model, reference


def generate(
    params, prompt: bytes, length: int, *, seed: int, window: int, temperature=0.7
) -> bytes:
    """Continue a text on one device.

    The whole text is recomputed for every byte: at a few hundred bytes that takes
    seconds, and needs no second form of the model with a cache.

    Args:
      params: of the model.
      prompt: at least one byte.
      length: how many bytes to add.
      seed: of the random choice among the likely bytes.
      window: tokens that each second layer sees.
      temperature: the lower, the likelier the chosen bytes.

    Returns:
      The ``length`` bytes that follow the prompt.
    """
    tokens = np.zeros(len(prompt) + length, np.int32)
    tokens[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    key = jax.random.key(seed)
    tokens = _continue(params, tokens, len(prompt), window, key, temperature)
    return np.asarray(tokens)[len(prompt) :].astype(np.uint8).tobytes()


def printable(text: bytes) -> str:
    """Decode for a terminal: what is not printable becomes a dot.

    >>> printable(bytes([97, 27, 98]))
    'a·b'
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else "·"
        for character in text.decode("utf-8", errors="replace")
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _continue(params, tokens, start, window, key, temperature):
    positions = jnp.arange(tokens.size, dtype=jnp.int32)

    def write(place, tokens):
        # Causal attention: the zeros that follow do not change what stands before.
        attend = functools.partial(reference.dense_attention, window=window)
        logits = model.apply(params, tokens[None], positions, attend)[0, place - 1]
        draw = jax.random.fold_in(key, place)
        token = jax.random.categorical(draw, logits / temperature)
        return tokens.at[place].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(start, tokens.size, write, tokens)
