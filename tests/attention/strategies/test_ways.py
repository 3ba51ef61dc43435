"""Documents choose once what a pass computes and sends, on all ranks alike."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

import jaxcomm
from jaxcomm.attention import document_layout, segment_ids_of, table
from jaxcomm.attention.strategies import loop, ways

pytestmark = pytest.mark.usefixtures("called")

TOKENS, SIZE = 48, 4
# Of bfloat16, relative to the largest number.
LIMIT = 0.03
# By four ranks of twelve tokens: no document is cut; few tokens are of one that is;
# most are; and numbers that come again.
WHOLE, SOME, ALL = [12, 5, 7, 4, 8, 12], [10, 4, 10, 9, 5, 10], [30, 18]
AGAIN = np.repeat([3, 1, 3, 0], 12).astype(np.int32)
EACH = [*(("ring", x) for x in (WHOLE, SOME, ALL)), ("halo", ALL), ("all_gather", ALL)]


def ids_of(lengths):
    return segment_ids_of(lengths, TOKENS)[None]


def arrays_of(batch=1):
    rng = np.random.default_rng(0)
    shapes = [(batch, TOKENS, n, 8) for n in (4, 2, 2, 4)]
    *arrays, grad = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    return arrays, (grad, np.zeros((batch, TOKENS, 4), np.float32))


def compare(ids, batch=1, window=None, **how):
    arrays, grads = arrays_of(batch)
    options = Options(is_causal=True, window=window, query_ids=ids)
    how = {"size": SIZE, "schedule": "contiguous", "implementation": "flash"} | how
    split.compare(*arrays, options, grads, LIMIT, **how)


@pytest.mark.parametrize(
    ("make", "lengths", "sends"),
    [
        ("contiguous", WHOLE, 0),
        # Three forward, three back, and the gradients come home.
        ("contiguous", SOME, 7),
        # Back the ring begins with a block that is far away.
        ("contiguous", ALL, 8),
        ("zigzag", WHOLE, 8),
        # Ranks 1 and 2 have few tokens of what is cut, and not the same ones.
        ("zigzag", [6, 4, 4, 4, 6, 6, 4, 4, 4, 6], 7),
        ("documents", [12] * 4, 0),
        ("documents", ALL, 8),
    ],
)
def test_what_nobody_sees_is_not_sent(make, lengths, sends):
    def sent():
        live = [one.stats()["calls"] for one in jaxcomm.communicators()]
        return sum(calls.get("permute", 0) for calls in live)

    layout = document_layout(lengths, SIZE) if make == "documents" else None
    before = sent()
    compare(ids_of(lengths), layout=layout, schedule=make, return_residual=False)
    assert sent() - before == sends


@pytest.mark.parametrize("many", [1024, 1])
@pytest.mark.parametrize(("strategy", "lengths"), EACH)
def test_many_pieces_and_too_many(monkeypatch, strategy, lengths, many):
    """The second look, and kernels that take any documents."""
    for name, value in ("_FEW", 1), ("_MANY", many):
        monkeypatch.setattr(ways, name, value)
    monkeypatch.setattr(table, "MOST", 1)
    window = (9, 0) if strategy == "halo" else None
    compare(ids_of(lengths), strategy=strategy, window=window)


@pytest.mark.parametrize(
    ("strategy", "ids"),
    [
        *(("ring", x) for x in (ids_of(SOME), ids_of(ALL), AGAIN[None])),
        ("halo", ids_of(ALL)),
    ],
)
def test_groups_of_ranks_that_may_differ(strategy, ids):
    """What is sent is no part of a way: XLA's collectives would wait for all groups."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    # The rows of the other group are one document each.
    ids = np.concatenate([ids, ids_of(WHOLE)])
    window = (9, 0) if strategy == "halo" else None
    compare(ids, 2, mesh=mesh, strategy=strategy, window=window)


@pytest.mark.parametrize("strategy", ["ring", "halo", "all_gather"])
def test_padding_between_documents(strategy):
    ids = np.arange(TOKENS) // 15
    ids = np.where(np.arange(TOKENS) % 15 > 10, -1, ids)[None].astype(np.int32)
    compare(ids, strategy=strategy, window=(9, 0) if strategy == "halo" else None)


def test_many_ranks_are_a_loop(monkeypatch):
    monkeypatch.setattr(loop, "_UNROLLED_RANKS", 1)
    for lengths in (SOME, ALL):
        compare(ids_of(lengths))


def test_a_mapped_batch_goes_one_way():
    arrays, _ = arrays_of(3)
    ids = np.concatenate([ids_of(each) for each in (WHOLE, SOME, ALL)])
    layout = jaxcomm.Layout("contiguous", SIZE, TOKENS)
    (*arrays,), tokens = layout.reorder(tuple(arrays), segment_ids=ids)

    def local(tokens, *arrays):
        def one(positions, ids, *arrays):
            of = jaxcomm.Tokens(layout, positions[None], ids[None])
            return jaxcomm.ring_attention(
                *(x[None] for x in arrays), "context", of, is_causal=True,
                implementation="flash",
            )[0]  # fmt: skip

        return jax.vmap(one)(tokens.positions, tokens.segment_ids, *arrays)

    found = jax.jit(split.sharded(local, SIZE, split.SPLIT))(tokens, *arrays)
    options = Options(is_causal=True, query_ids=ids)
    split.assert_close([found], dense.attention(*arrays, options), LIMIT)


@pytest.mark.parametrize(
    ("strategy", "lengths", "size"),
    # One rank has no hops, which look for all ranks.
    [("ring", WHOLE, 1), *((*each, SIZE) for each in EACH)],
)
def test_wrong_tokens_of_one_rank_are_nan_on_all(strategy, lengths, size):
    arrays, _ = arrays_of()
    layout = jaxcomm.Layout("contiguous", size, TOKENS)
    (*arrays,), tokens = layout.reorder(tuple(arrays), segment_ids=ids_of(lengths))
    positions = tokens.positions.at[0, 25].add(1)
    window = (9, 0) if strategy == "halo" else None

    def local(positions, ids, *arrays):
        of = jaxcomm.Tokens(layout, positions, ids)
        return jaxcomm.ring_attention(
            *arrays, "context", of, is_causal=True, local_window_size=window,
            implementation="flash", strategy=strategy, backend="xla",
        )  # fmt: skip

    whole = split.sharded(local, size, split.SPLIT)

    def loss(*arrays):
        return whole(positions, tokens.segment_ids, *arrays).astype(np.float32).sum()

    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)
    for x in jax.tree.leaves(found):
        assert np.isnan(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("part", ["positions", "segment_ids"])
@pytest.mark.parametrize("lengths", [WHOLE, SOME, ALL])
def test_what_the_table_does_not_say_is_nan(lengths, part):
    """On the rank that holds it, and wherever it is seen."""
    arrays, _ = arrays_of()
    layout = jaxcomm.Layout("contiguous", SIZE, TOKENS)
    arrays, tokens = layout.reorder(
        [np.asarray(x) for x in arrays], segment_ids=ids_of(lengths)
    )
    assert tokens.table is not None
    changed = getattr(tokens, part).copy()
    changed[0, 30] += 50
    tokens = dataclasses.replace(tokens, **{part: changed})

    def local(tokens, *arrays):
        return jaxcomm.ring_attention(
            *arrays,
            "context",
            tokens,
            is_causal=True,
            implementation="flash",
            backend="xla",
        )

    whole = split.sharded(local, SIZE, split.SPLIT)

    def loss(tokens, *arrays):
        out = whole(tokens, *arrays)
        return out.astype(np.float32).sum(), out

    run = jax.jit(jax.value_and_grad(loss, (1, 2, 3), has_aux=True))
    (_, out), grads = run(tokens, *arrays)
    for x in (out, *grads):
        ranks = np.isnan(np.asarray(x, np.float32)).reshape(SIZE, -1)
        assert ranks[2].all()
        assert lengths is not WHOLE or not ranks[[0, 1, 3]].any()


def test_second_derivatives_know_the_documents_of_others():
    """They are XLA's, which takes documents by number."""
    (query, *keys), _ = arrays_of()
    layout = jaxcomm.Layout("contiguous", 2, TOKENS)
    (query, *keys), tokens = layout.reorder(
        (query, *keys), segment_ids=ids_of([22, 4, 22])
    )

    def along(implementation):
        def local(query, tokens, *keys):
            return jaxcomm.ring_attention(
                query, *keys, "context", tokens, is_causal=True,
                implementation=implementation,
            )  # fmt: skip

        whole = split.sharded(local, 2, split.SPLIT)

        def loss(query):
            return (whole(query, tokens, *keys).astype(np.float32) ** 2).sum()

        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)))(query)

    found, expected = (
        [np.asarray(x, np.float32) for x in along(name)] for name in ("flash", "xla")
    )
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=LIMIT * np.abs(other).max())
