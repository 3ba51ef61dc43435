"""A ring over tokens of documents ends where no rank sees another key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import ring_over

import jaxcomm
from jaxcomm.attention import document_layout
from jaxcomm.attention.positions import TRUSTED

SIZE, LENGTH = 4, 32
SPLIT = jax.P(None, "context")


def ids_of(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def sends():
    """Count the blocks that a rank has sent."""
    return sum(
        calls.get("permute", 0)
        for calls in (one.stats()["calls"] for one in jaxcomm.communicators())
    )


@pytest.fixture
def none_live():
    jaxcomm.finalize()
    yield
    jaxcomm.finalize()


def program(layout, mesh, axis_names=frozenset({"context"}), **options):
    """Return a compiled ring over tokens that are dealt, and their segment ids."""

    def local(x, ids, layout):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=TRUSTED,
            query_segment_ids=ids, key_value_segment_ids=ids,
            **{"is_causal": True} | options,
        )  # fmt: skip

    specs = SPLIT, SPLIT, jax.P()
    whole = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=SPLIT, axis_names=axis_names
    )
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
def test_blocks_that_nobody_sees_are_not_sent(none_live, schedule, options, cases):
    """Documents that change need no other program."""
    traces = []

    @jax.jit
    def run(x, ids, layout):
        traces.append(layout)
        return program(layout, ring_over(SIZE), **options)(x, ids)

    gradient = jax.jit(jax.grad(lambda *of: run(*of).sum()))
    for lengths, sent in cases.items():
        layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
        if schedule == "documents":
            layout = document_layout(lengths, SIZE)
        elif schedule == "zigzag":
            layout = jaxcomm.Layout("zigzag", SIZE, LENGTH)
        (x, ids), _ = layout.reorder((np.ones((1, LENGTH, 2, 8)), ids_of(*lengths)))
        before = sends()
        jax.block_until_ready(run(x.astype("float32"), ids, layout))
        assert sends() - before == sent
        # Forward again; then the blocks go back, and gradients follow one send behind.
        jax.block_until_ready(gradient(x.astype("float32"), ids, layout))
        assert sends() - before == (3 * sent + 1 if sent else 0)
    assert len(traces) == 1


def test_groups_that_may_disagree_send_all(none_live):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    run = program(layout, mesh, frozenset({"data", "context"}))
    run(jnp.ones((1, LENGTH, 2, 8)), ids_of(8, 8, 8, 8)).block_until_ready()
    assert sends() == SIZE - 1


def test_layouts_of_rows_meet_layouts_of_all():
    rows = document_layout([[8, 8], [4, 12]], SIZE)
    rule = jaxcomm.Layout("contiguous", SIZE, 16)
    x = np.ones((2, 16, 2, 8), np.float32)
    for layout, key_layout in ((rows, rule), (rule, rows)):
        whole = jax.shard_map(
            lambda x, layout, key_layout: jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=layout, positions=TRUSTED,
                key_layout=key_layout, key_positions=TRUSTED, is_causal=True,
            ),
            mesh=ring_over(SIZE),
            in_specs=(SPLIT, jax.P(), jax.P()),
            out_specs=SPLIT,
        )  # fmt: skip
        np.testing.assert_allclose(jax.jit(whole)(x, layout, key_layout), x, rtol=1e-6)


@pytest.mark.thorough
def test_reverse_mode_over_reverse_mode():
    layout = jaxcomm.Layout("contiguous", SIZE, 8)
    ids = ids_of(3, 1, 4)
    x = jax.random.normal(jax.random.key(0), (1, 8, 1, 4))

    def second(attend):
        slope = jax.grad(lambda x: (attend(x, ids) ** 3).sum())
        return jax.jit(jax.grad(lambda x: (slope(x) * jnp.cos(x)).sum()))(x)

    def plain(x, ids):
        seen = np.tri(8, dtype=bool) & (ids[0][:, None] == ids[0])
        return jax.nn.dot_product_attention(x, x, x, mask=seen[None, None])

    found = second(program(layout, ring_over(SIZE)))
    np.testing.assert_allclose(found, second(plain), rtol=2e-3, atol=2e-3)
