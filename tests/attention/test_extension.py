"""A schedule and a strategy from outside of the package."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

from jaxcomm.attention import Schedule, Strategy
from jaxcomm.attention.kernels.operands import Grads


class Backwards(Schedule):
    """Contiguous slices, the last rank first."""

    name = "backwards"

    def positions(self, rank, size, length):
        return (size - 1 - rank) * length + np.arange(length, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Whole(Strategy):
    """XLA's all-gather of everything and one softmax over all of it."""

    name = "whole"

    def forward(self, call, inputs):
        return self._attend(call, inputs), inputs

    def backward(self, call, kept, saved):
        def attend(query, key, value):
            inputs = kept._replace(query=query, key=key, value=value)
            return self._attend(call, inputs)

        _, transpose = jax.vjp(attend, kept.query, kept.key, kept.value)
        grad_lse = (saved.grad_out * saved.out).sum(-1) - saved.delta
        return Grads(*transpose((saved.grad_out, grad_lse)))

    def _attend(self, call, inputs):
        key, value = jax.lax.all_gather(
            (inputs.key, inputs.value), call.axis_name, axis=1, tiled=True
        )
        rows = inputs.query_layout.positions_of(call.rank())
        columns = jnp.asarray(inputs.key_layout.all_positions())
        group = inputs.query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        scores = call.scale * jnp.einsum("btnh,bsnh->btns", inputs.query, key)
        seen = (rows[:, None] >= columns) & (columns < call.mask.key_length)
        seen &= rows[:, None] < call.mask.query_length
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
        return jnp.einsum("btns,bsnh->btnh", weights, value), lse


@pytest.mark.parametrize(
    ("schedule", "strategy", "window"),
    [
        (Backwards(), "ring", None),
        # It stops early.
        (Backwards(), "halo", (5, 0)),
        ("zigzag", Whole(), None),
    ],
)
def test_what_is_added_from_outside_is_right_with_gradients(
    assert_close, schedule, strategy, window
):
    *arrays, grads = split.random_inputs((1, 32, 4, 8), (1, 32, 2, 8))
    options = dense.Options(is_causal=True, window=window)
    found = split.attend(
        *arrays, options, grads, size=4, schedule=schedule, strategy=strategy
    )
    assert_close(found, dense.attention(*arrays, options, grads), 1e-5)
