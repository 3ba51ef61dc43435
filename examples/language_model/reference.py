"""The same training on one device with ordinary attention, to compare with."""

import functools

import jax
import jax.numpy as jnp

from language_model import model, step


@jax.checkpoint
def dense_attention(query, key, value):
    """Compute causal attention of whole sequences; (B, T, N, D), O(T^2) memory."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def make_train(optimizer):
    """Return ``train(state, batch) -> (state, loss)``, compiled for one device.

    The batch is two int32 arrays of shape (B, T) in natural order.
    """

    def loss(params, batch):
        positions = jnp.arange(batch[0].shape[1], dtype=jnp.int32)

        # One sequence at a time bounds the memory of the scores.
        def of_sequence(pair):
            tokens, targets = (row[None] for row in pair)
            return model.next_token_losses(
                params, tokens, targets, positions, dense_attention
            ).mean()

        return jax.lax.map(of_sequence, batch).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return step.update(state, grads, optimizer), value

    return train
