"""A ring over tokens of documents ends where no rank sees another key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import SPLIT, sharded

import jaxcomm
from jaxcomm.attention import document_layout
from jaxcomm.attention.positions import TRUSTED

SIZE, LENGTH = 4, 32


def ids_of(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def sends():
    """Count the blocks that a rank has sent."""
    live = [one.stats()["calls"] for one in jaxcomm.communicators()]
    return sum(calls.get("permute", 0) for calls in live)


def program(layout, mesh=None, **options):
    """Return a compiled ring over tokens that are dealt, and their segment ids."""

    def local(x, ids, layout):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=TRUSTED,
            query_segment_ids=ids, key_value_segment_ids=ids,
            **{"is_causal": True} | options,
        )  # fmt: skip

    whole = sharded(local, SIZE, (SPLIT, SPLIT, jax.P()), mesh=mesh)
    return jax.jit(lambda x, ids: whole(x, ids, layout))


@pytest.mark.parametrize(
    ("schedule", "options", "cases"),
    [
        (
            "contiguous",
            {},
            {(8, 8, 8, 8): 0, (9, 7, 16): 1, (9, 23): 2, (4, 18, 10): 2, (32,): 3},
        ),
        # The first token of a rank sees the last of the rank before the last.
        ("contiguous", {"local_window_size": (9, 0)}, {(16, 16): 1, (32,): 2}),
        (
            "contiguous",
            {"is_causal": False, "local_window_size": (0, 31)},
            {(8, 8, 8, 8): 0, (32,): 3},
        ),
        ("zigzag", {}, {(4,) * 8: 0, (32,): 3}),
        ("documents", {}, {(8, 8, 8, 8): 0, (3, 5, 20, 4): 3}),
    ],
)
def test_blocks_that_nobody_sees_are_not_sent(schedule, options, cases):
    """Documents that change need no other program."""
    traces = []

    @jax.jit
    def run(x, ids, layout):
        traces.append(layout)
        return program(layout, **options)(x, ids)

    gradient = jax.jit(jax.grad(lambda *of: run(*of).sum()))
    for lengths, sent in cases.items():
        if schedule == "documents":
            layout = document_layout(lengths, SIZE)
        else:
            layout = jaxcomm.Layout(schedule, SIZE, LENGTH)
        (x, ids), _ = layout.reorder((np.ones((1, LENGTH, 2, 8)), ids_of(*lengths)))
        before = sends()
        jax.block_until_ready(run(x.astype("float32"), ids, layout))
        assert sends() - before == sent
        # Forward again; then the blocks go back, and gradients follow one send behind.
        jax.block_until_ready(gradient(x.astype("float32"), ids, layout))
        assert sends() - before == (3 * sent + 1 if sent else 0)
    assert len(traces) == 1


def test_groups_that_may_disagree_send_all():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    run = program(layout, mesh)
    run(jnp.ones((1, LENGTH, 2, 8)), ids_of(8, 8, 8, 8)).block_until_ready()
    assert sends() == SIZE - 1


def test_layouts_of_rows_meet_layouts_of_all():
    rows = document_layout([[8, 8], [4, 12]], SIZE)
    rule = jaxcomm.Layout("contiguous", SIZE, 16)
    x = np.ones((2, 16, 2, 8), np.float32)

    def local(x, layout, key_layout):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=TRUSTED,
            key_layout=key_layout, key_positions=TRUSTED, is_causal=True,
        )  # fmt: skip

    whole = jax.jit(sharded(local, SIZE, (SPLIT, jax.P(), jax.P())))
    for layouts in ((rows, rule), (rule, rows)):
        np.testing.assert_allclose(whole(x, *layouts), x, rtol=1e-6)
