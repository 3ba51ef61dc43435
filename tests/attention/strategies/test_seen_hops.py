"""A ring over tokens of documents ends where no rank sees another key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Options, attention
from split import assert_close, attend, random_inputs, ring_over

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
            is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids, **options,
        )  # fmt: skip

    specs = SPLIT, SPLIT, jax.P()
    whole = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=SPLIT, axis_names=axis_names
    )
    return jax.jit(lambda x, ids: whole(x, ids, layout))


@pytest.mark.parametrize(
    ("layout", "lengths", "sent"),
    [
        ("contiguous", (8, 8, 8, 8), 0),
        ("contiguous", (9, 7, 16), 1),
        ("contiguous", (4, 18, 10), 2),
        ("contiguous", (32,), 3),
        ("zigzag", (4,) * 8, 0),
        ("zigzag", (32,), 3),
        ("documents", (8, 8, 8, 8), 0),
        ("documents", (3, 5, 20, 4), 3),
    ],
)
def test_blocks_that_nobody_sees_are_not_sent(none_live, layout, lengths, sent):
    if layout == "documents":
        layout = document_layout(lengths, SIZE)
    else:
        layout = jaxcomm.Layout(layout, SIZE, LENGTH)
    x, ids = jnp.ones((1, LENGTH, 2, 8)), ids_of(*lengths)
    (x, ids), _ = layout.reorder((x, ids))
    run = program(layout, ring_over(SIZE))
    jax.block_until_ready(run(x, ids))
    assert sends() == sent
    # Forward again; then the blocks go back, and gradients follow one send behind.
    jax.block_until_ready(jax.grad(lambda x: run(x, ids).sum())(x))
    assert sends() - sent == (2 * sent + 1 if sent else 0)


def test_documents_that_change_need_no_other_program(none_live):
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    run = program(layout, ring_over(SIZE))
    x = jnp.ones((1, LENGTH, 2, 8))
    for lengths, sent in (((8,) * 4, 0), ((32,), 3), ((9, 23), 2)):
        before = sends()
        jax.block_until_ready(run(x, ids_of(*lengths)))
        assert sends() - before == sent
    assert run._cache_size() == 1


def test_groups_that_may_disagree_send_all(none_live):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    run = program(layout, mesh, frozenset({"data", "context"}))
    run(jnp.ones((1, LENGTH, 2, 8)), ids_of(8, 8, 8, 8)).block_until_ready()
    assert sends() == SIZE - 1


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [("contiguous", 1), ("contiguous", 3), ("zigzag", 3), ("striped", 2)],
)
def test_results_and_gradients_are_those_of_float64(schedule, seed):
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(0, LENGTH + 1, (2, seed)), 1)
    ids = (np.arange(LENGTH)[:, None] >= cuts[:, None]).sum(-1).astype(np.int32)
    ids[0, : seed // 2] = -1
    *arrays, grads = random_inputs((2, LENGTH, 4, 8), (2, LENGTH, 2, 8))
    bias = random.standard_normal((1, 4, LENGTH, LENGTH)).astype(np.float32)
    lengths = np.array([LENGTH, 20])
    options = Options(
        is_causal=True, query_ids=ids, key_ids=ids, query_lengths=lengths,
        key_lengths=lengths, bias=bias,
        slopes=random.random(4).astype(np.float32),
    )  # fmt: skip
    found = attend(*arrays, options, grads, size=SIZE, schedule=schedule)
    assert_close(found, attention(*arrays, options, grads), 2e-5)


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


def test_reverse_mode_over_reverse_mode():
    layout = jaxcomm.Layout("contiguous", SIZE, LENGTH)
    ids = ids_of(9, 7, 16)
    x = jax.random.normal(jax.random.key(0), (1, LENGTH, 2, 8))

    def second(attend):
        slope = jax.grad(lambda x: (attend(x, ids) ** 3).sum())
        return jax.grad(lambda x: (slope(x) * jnp.cos(x)).sum())(x)

    def plain(x, ids):
        seen = np.tri(LENGTH, dtype=bool) & (ids[0][:, None] == ids[0])
        return jax.nn.dot_product_attention(x, x, x, mask=seen[None, None])

    found = second(program(layout, ring_over(SIZE)))
    np.testing.assert_allclose(found, second(plain), rtol=2e-3, atol=2e-3)
