"""A ring over documents of which none is on two ranks sends nothing."""

import jax
import numpy as np
import pytest
from split import SPLIT, sharded

import jaxcomm
from jaxcomm.attention import document_layout

SIZE, LENGTH = 4, 32


def ids_of(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def batch_of(layout, ids):
    """Return what a rank's attention is of, and its tokens."""
    return layout.reorder(np.ones((1, LENGTH, 2, 8), "float32"), segment_ids=ids)


def sends():
    live = [one.stats()["calls"] for one in jaxcomm.communicators()]
    return sum(calls.get("permute", 0) for calls in live)


def program(mesh=None, **options_given):
    """Return a compiled ring over a batch as ``reorder`` returns it."""

    def local(x, tokens):
        options = {"is_causal": True} | options_given
        return jaxcomm.ring_attention(
            x, x, x, "context", tokens, strategy="ring", **options
        )

    return jax.jit(sharded(local, SIZE, SPLIT, mesh=mesh))


@pytest.mark.parametrize(
    ("schedule", "options", "cases"),
    [
        ("contiguous", {}, {(8, 8, 8, 8): 0, (9, 7, 16): 3}),
        ("contiguous", {"local_window_size": (9, 0)}, {(8, 8, 8, 8): 0, (16, 16): 2}),
        ("zigzag", {"is_causal": False}, {(4,) * 8: 0, (32,): 3}),
        ("documents", {}, {(8, 8, 8, 8): 0, (3, 5, 20, 4): 3}),
    ],
)
def test_nothing_is_sent_where_no_document_is_shared(schedule, options, cases):
    """Documents that change need no other program."""
    traces = []

    @jax.jit
    def gradient(x, tokens):
        traces.append(None)
        return jax.grad(lambda x: program(**options)(x, tokens).sum())(x)

    for lengths, sent in cases.items():
        if schedule == "documents":
            layout = document_layout(lengths, SIZE)
        else:
            layout = jaxcomm.Layout(schedule, SIZE, LENGTH)
        batch = batch_of(layout, ids_of(*lengths))
        before = sends()
        # Forward; then the blocks go back, and gradients follow one send behind.
        jax.block_until_ready(gradient(*batch))
        assert sends() - before == (2 * sent + 1 if sent else 0)
    assert len(traces) == 1


def test_groups_that_may_disagree_send_all():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    program(mesh)(*batch_of(layout, ids_of(8, 8, 8, 8))).block_until_ready()
    assert sends() == SIZE - 1


def test_an_axis_may_be_left_to_xla():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    x, tokens = batch_of(jaxcomm.Layout("zigzag", SIZE, LENGTH), ids_of(9, 23))

    def local(x, tokens):
        return jaxcomm.ring_attention(
            x, x, x, "context", tokens, backend="xla", strategy="ring"
        )

    whole = jax.jit(sharded(local, mesh=mesh, axis_names={"context"}))
    np.testing.assert_allclose(whole(x, tokens), x, rtol=1e-6)


def test_layouts_of_rows_meet_layouts_of_all():
    rows = document_layout([[8, 8], [4, 12]], SIZE)
    rule = jaxcomm.Layout("contiguous", SIZE, 16)
    x = np.ones((2, 16, 2, 8), np.float32)

    def local(x, tokens, key_tokens):
        return jaxcomm.ring_attention(
            x, x, x, "context", tokens, key_tokens=key_tokens, is_causal=True,
            strategy="ring",
        )  # fmt: skip

    whole = jax.jit(sharded(local, SIZE))
    tokens = [layout.reorder(x)[1] for layout in (rows, rule)]
    for order in (tokens, tokens[::-1]):
        np.testing.assert_allclose(whole(x, *order), x, rtol=1e-6)
