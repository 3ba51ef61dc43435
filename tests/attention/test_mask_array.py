"""``mask=`` as an array, with every option that changes scores, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm

SHAPE = (2, 12, 4, 8)
CAP = 1.5


def dense(query, key, value, bias, mask):
    """Attention as the docstring of ring_attention says: the mask comes last."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(SHAPE[3])
    scores = CAP * jnp.tanh((scores + bias) / CAP)
    weights = jnp.where(mask, jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_mask_hides_keys_whatever_else_changes_the_scores(size, strategy):
    with jax.enable_x64(True):
        random = np.random.default_rng(3)
        query, key, value, grad = (
            jnp.asarray(random.normal(size=SHAPE)) for _ in "qkvg"
        )
        bias = jnp.asarray(random.normal(size=(1, 4, 12, 12)))
        mask = random.random((2, 1, 12, 12)) < 0.6
        mask[1, :, 5] = False  # A row that sees nothing.
        mask = jnp.asarray(mask)
        # The layout of tokens in natural order needs no reordering.
        layout = jaxcomm.Layout("contiguous", size, SHAPE[1])

        def local(query, key, value, bias, mask):
            return jaxcomm.ring_attention(
                *(query, key, value, bias, mask),
                axis_name="context",
                layout=layout,
                logits_soft_cap=CAP,
                strategy=strategy,
            )

        rows = jax.P(None, None, "context")
        run = jax.shard_map(
            local,
            mesh=split.ring_over(size),
            in_specs=(split.SPLIT,) * 3 + (rows, rows),
            out_specs=split.SPLIT,
        )

        def value_and_grads(function):
            out, pull = jax.vjp(lambda *x: function(*x, mask), query, key, value, bias)
            return out, *pull(grad)

        found = value_and_grads(jax.jit(run))
        for x, y in zip(found, value_and_grads(dense), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
        assert (found[0][1, 5] == 0).all()
