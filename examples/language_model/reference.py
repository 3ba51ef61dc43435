"""The same training on one device with ordinary attention, to compare with."""

import functools

import jax
import jax.numpy as jnp

from language_model import model, step


def dense_attention(query, key, value, is_windowed, documents=None, window=None):
    """Compute causal attention of whole sequences, with O(T^2) memory.

    Args:
      query, key, value: (B, T, N, D).
      is_windowed: whether a token sees ``window`` tokens alone, itself included.
      documents: int32 (B, T), the document of each token. If None, there is one.
      window: tokens.
    """
    mask = None
    if documents is not None:
        mask = documents[:, None, :, None] == documents[:, None, None, :]
    left = None if window is None or not is_windowed else (window - 1, 0)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, local_window_size=left
    )
    return jax.checkpoint(attend)(query, key, value, mask=mask)


def make_train(optimizer, window: int, dtype: str = "float32"):
    """Return ``train(state, batch) -> (state, loss)``, compiled for one device.

    The batch is three int32 arrays of shape (B, T) in natural order, see
    ``data.draw_batch``.
    """

    def loss(params, batch):
        positions = jnp.arange(batch[0].shape[1], dtype=jnp.int32)

        # One sequence at a time bounds the memory of the scores.
        def of_sequence(rows):
            tokens, targets, documents = (row[None] for row in rows)

            def attend(query, key, value, is_windowed):
                return dense_attention(
                    query, key, value, is_windowed, documents, window
                )

            return model.next_token_losses(
                params, tokens, targets, positions, attend, dtype
            ).mean()

        return jax.lax.map(of_sequence, batch).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return step.update(state, grads, optimizer), value

    return train
