"""Documents choose once what a pass computes and sends, on all ranks alike."""

import dataclasses
import functools
import itertools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options
from packed_documents import (
    AGAIN,
    ALL,
    LIMIT,
    PADDED,
    SIZE,
    SOME,
    TOKENS,
    WHOLE,
    arrays_of,
    ids_of,
    window_of,
)

import jaxcomm
from jaxcomm.attention import document_layout, segment_ids_of, table, visibility
from jaxcomm.attention.strategies import loop, packing

pytestmark = pytest.mark.usefixtures("called")
thorough = pytest.mark.thorough

RING = "ring", [WHOLE, SOME, ALL]
HALO = "halo", [ALL]
GATHERED = "all_gather", [ALL]


def compare(*each, window=None, programs=None, **how):
    """Compare documents, of which all are computed by one program."""
    arrays, grads = arrays_of(len(each[0]))
    how = {"size": SIZE, "schedule": "contiguous", "implementation": "flash"} | how
    programs = {} if programs is None else programs
    for ids in each:
        options = Options(is_causal=True, window=window, query_ids=ids)
        split.compare(*arrays, options, grads, LIMIT, programs=programs, **how)
    assert len(programs) == 1


@pytest.mark.parametrize(
    ("make", "sends"),
    [
        # Keys are gathered, and their gradients come home in one exchange. In a ring
        # there are three sends forward, three back, which begin with a block that is
        # far away, and one home.
        ("contiguous", [(WHOLE, 0), (SOME, 1), (ALL, 8), (PADDED, 8)]),
        # Ranks 1 and 2 have few tokens of what is cut, and not the same ones. Ranks of
        # "documents" have several chunks, too.
        pytest.param(
            "zigzag", [(WHOLE, 8), ([6, 4, 4, 4, 6, 6, 4, 4, 4, 6], 1)], marks=thorough
        ),
        # Dealt whole, but for one; and one that is cut in chunks.
        ("documents", [([12] * 4, 0), (ALL, 8), (WHOLE, 0), ([5, 1, 30, 9, 3], 8)]),
    ],
)
def test_what_nobody_sees_is_not_sent(make, sends, many_are):
    def sent():
        live = [one.stats()["calls"] for one in jaxcomm.communicators()]
        kinds = "permute", "all_to_all"
        return sum(calls.get(kind, 0) for calls in live for kind in kinds)

    programs, before = {}, 0
    for lengths, count in sends:
        layout = document_layout(lengths, SIZE) if make == "documents" else None
        how = {"layout": layout, "schedule": make, "return_residual": False}
        compare(ids_of(lengths), programs=programs, **how)
        assert sent() - before == (count if many_are == "ring" else min(count, 1))
        before = sent()


@pytest.mark.parametrize(
    ("strategy", "lengths", "many"),
    [
        (*RING, 24),
        (*HALO, 24),
        pytest.param(*GATHERED, 24, marks=thorough),
        (*GATHERED, 1),
    ],
)
def test_many_pieces_and_too_many(monkeypatch, strategy, lengths, many):
    """The second look, and kernels that take any documents; with padding, too."""
    for name, value in ("_FEW", 1), ("_MANY", many):
        monkeypatch.setattr(packing, name, value)
    for module in table, visibility:
        monkeypatch.setattr(module, "most", lambda tokens: 1)
    each = map(ids_of, [*lengths, PADDED])
    compare(*each, strategy=strategy, window=window_of(strategy))


@pytest.mark.parametrize(
    ("strategy", "each"),
    [("ring", [SOME, ALL, AGAIN]), pytest.param("halo", [ALL], marks=thorough)],
)
def test_groups_of_ranks_that_may_differ(strategy, each):
    """What is sent is no part of a way: XLA's collectives would wait for all groups."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, SIZE), ("data", "context"), auto)
    # The rows of the other group are one document each.
    each = [np.concatenate([ids_of(some), ids_of(WHOLE)]) for some in each]
    compare(*each, mesh=mesh, strategy=strategy, window=window_of(strategy))


def test_many_ranks_are_a_loop(monkeypatch):
    monkeypatch.setattr(loop, "_UNROLLED_RANKS", 1)
    compare(ids_of(SOME), ids_of(ALL))


def test_a_mapped_batch_goes_one_way():
    arrays, _ = arrays_of(2)
    ids = np.concatenate([ids_of(each) for each in (WHOLE, ALL)])
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
    ("strategy", "each", "size"),
    # One rank has no hops, which look for all ranks.
    [
        ("ring", [WHOLE], 1),
        (*RING, SIZE),
        (*HALO, SIZE),
        (*GATHERED, SIZE),
    ],
)
def test_wrong_tokens_of_one_rank_are_nan_on_all(strategy, each, size):
    arrays, _ = arrays_of()
    layout = jaxcomm.Layout("contiguous", size, TOKENS)
    window = window_of(strategy)

    def local(positions, ids, *arrays):
        of = jaxcomm.Tokens(layout, positions, ids)
        return jaxcomm.ring_attention(
            *arrays, "context", of, is_causal=True, local_window_size=window,
            implementation="flash", strategy=strategy, backend="xla",
        )  # fmt: skip

    whole = split.sharded(local, size, split.SPLIT)

    def loss(*of):
        return whole(*of).astype(np.float32).sum()

    run = jax.jit(jax.value_and_grad(loss, (2, 3, 4)))
    for lengths in each:
        of, tokens = layout.reorder(tuple(arrays), segment_ids=ids_of(lengths))
        wrong = jnp.asarray(tokens.positions).at[0, 25].add(1)
        for x in jax.tree.leaves(run(wrong, tokens.segment_ids, *of)):
            assert np.isnan(np.asarray(x, np.float32)).all()


def test_what_the_table_does_not_say_is_nan():
    """On the rank that holds it, and wherever it is seen."""
    arrays, _ = arrays_of()
    layout = jaxcomm.Layout("contiguous", SIZE, TOKENS)

    def local(tokens, *arrays):
        return jaxcomm.ring_attention(
            *arrays, "context", tokens, is_causal=True, implementation="flash",
            backend="xla",
        )  # fmt: skip

    whole = split.sharded(local, SIZE, split.SPLIT)

    def loss(tokens, *arrays):
        out = whole(tokens, *arrays)
        return out.astype(np.float32).sum(), out

    run = jax.jit(jax.value_and_grad(loss, (1, 2, 3), has_aux=True))
    numbers = [np.asarray(x) for x in arrays]
    for lengths, part in itertools.product(
        (WHOLE, SOME, ALL), ("positions", "segment_ids")
    ):
        of, tokens = layout.reorder(numbers, segment_ids=ids_of(lengths))
        assert tokens.table is not None
        changed = getattr(tokens, part).copy()
        changed[0, 30] += 50
        (_, out), grads = run(dataclasses.replace(tokens, **{part: changed}), *of)
        for x in (out, *grads):
            ranks = np.isnan(np.asarray(x, np.float32)).reshape(SIZE, -1)
            assert ranks[2].all()
            assert lengths is not WHOLE or not ranks[[0, 1, 3]].any()


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[thorough] * (seed > 1)) for seed in range(24)],
)
def test_random_documents(seed):
    """Of short and long ones, dealt in each way, with padding and several rows."""
    rng = np.random.default_rng(seed)
    size, rows = int(rng.choice([2, 3, 4, 8])), int(rng.integers(1, 3))
    total = size * int(rng.choice([7, 40, 300])) + int(rng.integers(3))
    mean = total * rng.choice([0.03, 0.1, 0.4])

    def lengths():
        each = np.maximum(rng.lognormal(np.log(mean), 1, 60).astype(int), 1)
        each = each[np.cumsum(each) < total].tolist()
        return [*each, total - sum(each)]

    every = [lengths() for _ in range(rows)]
    ids = np.stack([segment_ids_of(each) for each in every]).astype(np.int32)
    ids[:, total - int(rng.integers(0, total // 4)) :] = -1
    schedule = str(rng.choice(["contiguous", "zigzag", "documents"]))
    layout = document_layout(every, size) if schedule == "documents" else None
    shapes = [(rows, total, n, 8) for n in (4, 2, 2, 4)]
    *arrays, grad = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    split.compare(
        *arrays, Options(is_causal=True, query_ids=ids),
        (grad, np.zeros((rows, total, 4), np.float32)), LIMIT, size=size,
        schedule=schedule, layout=layout, implementation="flash",
        agrees=bool(rng.integers(2)),
    )  # fmt: skip


def test_queries_that_see_nothing_of_others_may_be_longer_than_a_document():
    """They are one sequence of the one call, over many documents."""
    ids = np.tile(np.arange(12) * 8 // 12, SIZE).astype(np.int32)
    compare(ids_of(ids), agrees=True)


# Of XLA's kernel and documents, test_ring_transforms.py has them in `make test`.
@thorough
@pytest.mark.parametrize("has_table", [True, False])
def test_second_derivatives_know_the_documents_of_others(has_table):
    """They are XLA's, which takes documents by number."""
    arrays, _ = arrays_of()
    if has_table:
        arrays = [np.asarray(x) for x in arrays]
    layout, ids = jaxcomm.Layout("contiguous", 2, TOKENS), ids_of([22, 4, 22])
    (query, *keys), tokens = layout.reorder(tuple(arrays), segment_ids=ids)

    def ring(query, tokens, *keys):
        return jaxcomm.ring_attention(
            query, *keys, "context", tokens, is_causal=True, implementation="flash"
        )

    whole = split.sharded(ring, 2, split.SPLIT)
    plain = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, mask=ids[0][:, None] == ids[0]
    )

    def along(attend, query):
        def loss(query):
            return (attend(query).astype(np.float32) ** 2).sum()

        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)))(query)

    found = along(lambda x: whole(x, tokens, *keys), query)
    exact = [x.astype(np.float32) for x in arrays]
    expected = along(lambda x: plain(x, *exact[1:]), exact[0])
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0.1
        one = np.asarray(one, np.float32)
        np.testing.assert_allclose(one, other, atol=LIMIT * np.abs(other).max())
