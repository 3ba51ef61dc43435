"""What a call of attention chose serves its gradient too, whenever JAX traces that."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import SPLIT, over_ring, sharded

import jaxcomm
from jaxcomm.attention import combine, document_layout, relayout
from jaxcomm.attention.strategies.ulysses import Usp

SIZE, LENGTH = 4, 32
PLAIN, ZIGZAG = (jaxcomm.Layout(of, SIZE, LENGTH) for of in ("contiguous", "zigzag"))
DOCUMENTS = document_layout([20, 12], SIZE)


def ring(strategy, x, tokens, sinks, **options):
    """Sinks are on every rank, and their gradient is a sum over the ranks."""
    window = (3, 0) if strategy == "halo" else None
    return jaxcomm.ring_attention(
        x, x, x, "context", tokens, is_causal=True, strategy=strategy,
        local_window_size=window, sinks=sinks, **options,
    )  # fmt: skip


def move(x, tokens, _, **options):
    return relayout(x, tokens, PLAIN, "context", **options)


def merge(x, *_, **options):
    return combine(x, x[..., 0], "context", scatter=1, **options)[0]


STRATEGIES = ("ring", "all_gather", "ulysses", Usp(2), "halo")
FUNCTIONS = {
    **{f"ring_attention, {of}": functools.partial(ring, of) for of in STRATEGIES},
    "relayout": move,
    "combine": merge,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("says", ["scope", "argument"])
def test_gradients_travel_by_the_lane_and_the_backend_of_the_call(name, says):
    """JAX's caches cannot say so: no other test has this lane."""
    chosen = {"lane": f"{says}_{name}", "backend": "xla"}

    def local(*of_rank):
        if says == "argument":
            return FUNCTIONS[name](*of_rank, **chosen)
        with jaxcomm.using(**chosen):
            return FUNCTIONS[name](*of_rank)

    layout = ZIGZAG if "halo" in name else DOCUMENTS
    x, tokens = layout.reorder(np.ones((1, LENGTH, 4, 8), np.float32))
    # Under grad, JAX traces the rules of what it jitted when the scope is gone.
    whole = jax.jit(sharded(local, SIZE, (SPLIT, SPLIT, jax.P())))
    gradient = jax.grad(lambda x, *of: (whole(x, tokens, *of) ** 2).sum(), (0, 1))
    text = str(jax.make_jaxpr(gradient)(x, np.ones(4, np.float32)))
    calls = re.findall(r"lane=(.*?), backend=(.*?)[,)]", text)
    assert len(calls) > 1
    assert set(calls) == {(repr(chosen["lane"]), "'xla'")}


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_no_infinity_is_kept_for_rows_that_see_nothing(strategy):
    """Outside of ``jax.jit``, where ``jax_debug_infs`` looks at all that is kept."""
    x = jnp.ones((1, 8, 2, 4))
    mask = np.arange(8)[:, None] > 1

    def loss(x):
        return jaxcomm.dot_product_attention(
            x, x, x, mask=mask, sharding=over_ring(2),
            query_seq_lengths=5, strategy=strategy,
        ).sum()  # fmt: skip

    with jax.debug_infs(True):
        assert jnp.isfinite(jax.grad(loss)(x)).all()
