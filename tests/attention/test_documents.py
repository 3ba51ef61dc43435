"""Layouts for packed documents, and moving between layouts."""

import dense
import jax
import numpy as np
import pytest
import split
from split import sharded

from jaxcomm.attention import document_layout, relayout, segment_ids_of
from jaxcomm.attention.layout import Layout


def _log_normal(seed, count=64):
    rng = np.random.default_rng(seed)
    return np.maximum(1, np.exp(rng.normal(5.0, 1.3, count))).astype(int).tolist()


def _work(layout, lengths):
    """Count the keys that the queries of each rank see under a causal mask."""
    held = np.asarray(layout.all_positions())
    seen = [np.arange(1, n + 1) for n in lengths]
    seen = np.concatenate([*seen, np.zeros(held.size, int)])
    return seen[held.reshape(layout.size, -1)].sum(1)


@pytest.mark.parametrize(
    ("size", "lengths", "most"),
    [
        (2, _log_normal(0), 1.01),
        (8, _log_normal(1), 1.01),
        # To send all keys would cost five times what balance gains.
        (8, _log_normal(2), 1.4),
        *((4, lengths, None) for lengths in ([], [0, 3, 0], [100, 1, 1], [16] * 8)),
    ],
)
def test_every_token_is_held_once_and_the_work_of_many_is_balanced(size, lengths, most):
    layout, total = document_layout(lengths, size), sum(lengths)
    held = np.sort(layout.order.reshape(-1))
    np.testing.assert_array_equal(held, np.arange(layout.order.size))
    assert layout.local_length == -(-total // size)
    x = np.arange(2 * total).reshape(2, -1)
    dealt, tokens = layout.reorder(x)
    np.testing.assert_array_equal(tokens.restore(dealt), x)
    work = _work(layout, lengths)
    assert work.sum() == sum(n * (n + 1) // 2 for n in lengths)
    if lengths == [16] * 8:  # Whole documents stay on one rank.
        assert all(len(set(held)) == 2 for held in (layout.order // 16).tolist())
    if most:
        assert work.max() <= most * work.mean()
        # Contiguous is what a balanced layout is measured by.
        contiguous = _work(Layout("contiguous", 8, total), lengths)
        assert contiguous.max() > 1.3 * work.mean() * size / 8


@pytest.mark.parametrize(
    ("tokens", "size", "most"), [(2**15, 2, 1.01), (2**15, 4, 1.15), (2**17, 4, 1.15)]
)
def test_documents_stay_whole_where_sending_their_keys_costs_more(tokens, size, most):
    """24, of which one has a seventh of the tokens. Dealt in zigzag, half is sent."""
    shares = np.sort(np.random.default_rng(0).lognormal(0, 1, 24))
    lengths = (shares / shares.sum() * tokens).astype(int).tolist()
    lengths[0] += tokens - sum(lengths)
    layout, ids = document_layout(lengths, size), segment_ids_of(lengths)
    work = _work(layout, lengths)
    assert work.max() <= most * work.mean()
    of_ranks = [set(ids[held].tolist()) for held in layout.order]
    cut = [x for x in range(24) if sum(x in held for held in of_ranks) > 1]
    assert sum(lengths[x] for x in cut) <= tokens / 16
    # Of each rank an eighth of the tokens is sent.
    assert np.isin(ids[layout.order], cut).sum(1).max() <= tokens / size / 8


@pytest.mark.parametrize("lengths", [[30, 5, 6], [2, 20, 19]])
def test_documents_that_are_dealt_equal_dense_attention(lengths):
    *arrays, grads = split.inputs((1, 41, 4, 8), (1, 41, 2, 8))
    ids = segment_ids_of(lengths)[None]
    options = dense.Options(is_causal=True, query_ids=ids)
    layout = document_layout(lengths, 4)
    split.compare(*arrays, options, grads, size=4, layout=layout)


@pytest.mark.parametrize(
    "strategy", [pytest.param("ring", marks=pytest.mark.thorough), "ulysses"]
)
def test_rows_of_a_batch_have_documents_of_their_own(make_mesh, strategy):
    """The batch is split over an axis, and so are its tokens."""
    lengths = [[30, 5, 6], [2, 20, 19], [41], [10, 10, 10, 11]]
    layout = document_layout(lengths, 4)
    assert layout.order.shape == (4, 4, 11)
    work = sum(n * (n + 1) // 2 for row in lengths for n in row)
    rows = [Layout(layout.schedule, 4, 41, order) for order in layout.order]
    assert sum(map(_work, rows, lengths)).sum() == work
    *arrays, grads = split.inputs((4, 41, 4, 8), (4, 41, 2, 8))
    of_rows = np.full(4, 40)
    options = dense.Options(
        is_causal=True,
        query_ids=np.stack([segment_ids_of(row) for row in lengths]),
        query_lengths=of_rows,
        key_lengths=of_rows,
        bias=split.inputs((1, 4, 1, 41))[0],
    )
    how = {"size": 4, "layout": layout, "mesh": make_mesh(data=2, context=4)}
    split.compare(*arrays, options, grads, strategy=strategy, **how)


@pytest.mark.parametrize(
    ("names", "documents"),
    [
        (("zigzag", "contiguous"), (9, 14, 6)),
        (("contiguous", "striped"), (9, 14, 9)),
        (("striped", "striped"), (9, 14, 6)),
        (("striped", "documents"), (9, 14, 6)),
        (("documents", "zigzag"), (9, 14, 9)),
        (("contiguous", "zigzag"), (2,)),
    ],
)
def test_relayout_moves_tokens_and_its_transpose_moves_them_back(names, documents):
    """Whatever is in padding stays there, in both directions."""
    length = sum(documents)
    layouts = [
        document_layout(documents, 4)
        if name == "documents"
        else Layout(name, 4, length)
        for name in names
    ]
    x = {"a": np.arange(2.0 * length).reshape(2, length).astype(np.float32)}
    x["b"] = np.ones((2, length, 3), np.float32) * x["a"][..., None]
    (source, held), (target, wanted) = (layout.reorder(x) for layout in layouts)

    def fill(tree, tokens):
        def one(x):
            at = tokens.positions
            is_token = (at >= 0).reshape(at.shape + (1,) * (x.ndim - 2))
            return np.where(is_token, x, np.float32(7))

        return jax.tree.map(one, tree)

    @jax.jit
    def run(x, grad, *tokens):
        whole = sharded(lambda x, *tokens: relayout(x, *tokens, "context"))
        out, transpose = jax.vjp(lambda x: whole(x, *tokens), x)
        return out, *transpose(grad)

    out, back = run(fill(source, held), fill(target, wanted), held, wanted)
    jax.tree.map(np.testing.assert_array_equal, out, target)
    jax.tree.map(np.testing.assert_array_equal, back, source)


def test_with_64_bits_positions_stay_int32():
    """Promotion is strict here: an int64 beside them raises."""
    source, target = document_layout((3, 2, 3), 2), Layout("zigzag", 2, 8)
    x = np.arange(8, dtype=np.float32)[None]

    @jax.jit
    def run(held, tokens):
        moved = sharded(lambda x, of: relayout(x, of, target, "context"), 2)
        return moved(held, tokens), tokens.restore(held)

    with jax.enable_x64(True):
        moved, restored = run(*source.reorder(x))
    np.testing.assert_array_equal(moved, target.reorder(x)[0])
    np.testing.assert_array_equal(restored, x)
