"""Layouts for packed documents, and moving between layouts."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import document_layout, document_work, relayout, segment_ids
from jaxcomm.attention.layout import Layout

SPLIT = jax.P(None, "context")


def _log_normal(seed, count=64):
    rng = np.random.default_rng(seed)
    return np.maximum(1, np.exp(rng.normal(5.0, 1.3, count))).astype(int).tolist()


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_token_is_held_once_and_the_work_is_balanced(seed, size):
    lengths = _log_normal(seed)
    layout = document_layout(lengths, size)
    held = np.sort(layout.order.reshape(-1))
    np.testing.assert_array_equal(held, np.arange(layout.order.size))
    assert layout.local_length == -(-sum(lengths) // size)
    work = document_work(layout, lengths)
    assert work.sum() == sum(n * (n + 1) // 2 for n in lengths)
    assert work.max() <= 1.1 * work.mean()
    # Contiguous is what a balanced layout is measured by.
    assert document_work(Layout("contiguous", 8, sum(lengths)), lengths).max() > (
        1.3 * work.mean() * size / 8
    )


def test_whole_documents_stay_on_one_rank_where_that_is_balanced():
    layout = document_layout([16] * 8, 4)
    for held in layout.order // 16:
        assert len(set(held.tolist())) == 2


@pytest.mark.parametrize("lengths", [[], [5], [0, 3, 0], [100, 1, 1]])
def test_any_documents_will_do(lengths):
    layout = document_layout(lengths, 4)
    x = np.arange(2 * sum(lengths)).reshape(2, -1)
    np.testing.assert_array_equal(layout.restore(*layout.reorder(x)), x)
    assert document_work(layout, lengths).sum() == sum(
        n * (n + 1) // 2 for n in lengths
    )


def test_other_documents_run_the_same_program_and_equal_dense_attention():
    mesh, traces = split.ring_over(4), []

    def local(query, key, value, ids, positions, layout):
        traces.append(layout)
        return jaxcomm.ring_attention(
            query, key, value, axis_name="context", layout=layout, is_causal=True,
            positions=positions, query_segment_ids=ids, return_residual=True,
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=mesh, in_specs=(*[SPLIT] * 5, jax.P()), out_specs=SPLIT
    )

    @jax.jit
    def run(arrays, ids, grads, positions, layout):
        result, transpose = jax.vjp(
            lambda *arrays: whole(*arrays, ids, positions, layout), *arrays
        )
        return *result, *transpose(grads)

    *arrays, grads = split.random_inputs((1, 41, 4, 8), (1, 41, 2, 8))
    for lengths in ([30, 5, 6], [2, 20, 19]):
        layout = document_layout(lengths, 4)
        ids = segment_ids(lengths)[None]
        batch = jax.tree.map(np.asarray, (tuple(arrays), ids, tuple(grads)))
        dealt, positions = layout.reorder(batch)
        found = run(*dealt, positions, layout)
        options = dense.Options(is_causal=True, query_ids=ids)
        expected = dense.attention(*arrays, options, grads)
        found = [layout.restore(np.asarray(x), positions) for x in found]
        split.assert_close(found, expected, 1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_rows_of_a_batch_have_documents_of_their_own(strategy):
    """The batch is split over an axis, and so is the layout."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), (jax.sharding.AxisType.Auto,) * 2)
    lengths = [[30, 5, 6], [2, 20, 19], [41], [10, 10, 10, 11]]
    layout = document_layout(lengths, 4)
    assert layout.order.shape == (4, 4, 11)
    assert document_work(layout, lengths).sum() == sum(
        n * (n + 1) // 2 for row in lengths for n in row
    )
    both = jax.P("data", "context")

    def local(query, key, value, ids, bias, positions, layout):
        return jaxcomm.ring_attention(
            query, key, value, bias, axis_name="context", layout=layout,
            is_causal=True, positions=positions, query_segment_ids=ids,
            query_seq_lengths=jnp.full(2, 40), key_value_seq_lengths=jnp.full(2, 40),
            strategy=strategy, return_residual=True,
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=mesh, in_specs=(*[both] * 4, jax.P(), both, jax.P("data")),
        out_specs=both,
    )  # fmt: skip
    *arrays, grads = split.random_inputs((4, 41, 4, 8), (4, 41, 4, 8))
    bias = split.random_inputs((1, 4, 1, 41))[0]
    ids = np.stack([segment_ids(row) for row in lengths])
    batch = jax.tree.map(np.asarray, (tuple(arrays), ids, tuple(grads)))
    (dealt, dealt_ids, dealt_grads), positions = layout.reorder(batch)

    @jax.jit
    def run(arrays, bias, grads):
        result, transpose = jax.vjp(
            lambda *of: whole(*of[:3], dealt_ids, of[3], positions, layout),
            *arrays, bias,
        )  # fmt: skip
        return *result, *transpose(grads)

    found = run(dealt, bias, dealt_grads)
    of_bias = found[-1]
    options = dense.Options(
        is_causal=True, query_ids=ids, bias=bias, query_lengths=np.full(4, 40),
        key_lengths=np.full(4, 40),
    )  # fmt: skip
    expected = dense.attention(*arrays, options, grads)
    found = [layout.restore(np.asarray(x), positions) for x in found[:-1]]
    split.assert_close([*found, of_bias], expected, 1e-5)
    inside = jax.jit(layout.restore)(dealt[0], positions)
    np.testing.assert_array_equal(inside, arrays[0])


def test_what_differs_by_row_is_refused_where_it_cannot_be():
    layout = document_layout([[4, 4], [2, 6]], 2)
    with pytest.raises(
        ValueError, match=r"a batch of 2 sequences, and x has shape \(3"
    ):
        layout.reorder(np.ones((3, 8)))
    with pytest.raises(
        ValueError, match=r"has shape \(8,\) with tokens in dimension 0"
    ):
        layout.reorder(np.ones(8), axis=0)
    with pytest.raises(ValueError, match=r"the rows have 7 to 8 tokens\. Pass rows of"):
        document_layout([[4, 4], [2, 5]], 2)
    plain = Layout("contiguous", 2, 8)
    with pytest.raises(ValueError, match="a layout differs by sequence of the batch"):
        relayout(jnp.ones((2, 4)), layout, plain, "i")

    def attend(x):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=jnp.arange(4)
        )

    whole = jax.shard_map(
        attend, mesh=split.ring_over(2), in_specs=SPLIT, out_specs=SPLIT
    )
    with pytest.raises(ValueError, match="query has 3 sequences on this rank, and lay"):
        jax.eval_shape(whole, jnp.ones((3, 8, 1, 4)))


@pytest.mark.parametrize("lengths", [None, 8, (n for n in [4, 4]), "ab", [[4], 4]])
@pytest.mark.parametrize(
    "call",
    [
        segment_ids,
        lambda lengths: document_layout(lengths, 2),
        lambda lengths: document_work(Layout("zigzag", 2, 8), lengths),
    ],
)
def test_lengths_are_a_sequence_of_integers(call, lengths):
    with pytest.raises(TypeError, match="pass a sequence of integers"):
        call(lengths)


def test_segment_ids_are_those_of_the_lengths():
    assert segment_ids([2, 0, 1], 5).tolist() == [0, 0, 2, -1, -1]
    with pytest.raises(ValueError, match="documents of 3 tokens in a sequence of 2"):
        segment_ids([3], 2)
    with pytest.raises(TypeError, match="pass a sequence of integers"):
        segment_ids([1.5])
    with pytest.raises(ValueError, match="no negative length"):
        document_layout([1, -1], 2)


@pytest.mark.parametrize("documents", [(9, 14, 6), (9, 14, 9)])
@pytest.mark.parametrize(
    "names",
    [
        ("zigzag", "contiguous"),
        ("contiguous", "striped"),
        ("striped", "zigzag"),
        ("striped", "documents"),
    ],
)
def test_relayout_moves_tokens_and_its_transpose_moves_them_back(names, documents):
    length = sum(documents)
    layouts = [
        document_layout(documents, 4)
        if name == "documents"
        else Layout(name, 4, length)
        for name in names
    ]
    x = {"a": np.arange(2.0 * length).reshape(2, length).astype(np.float32)}
    x["b"] = np.ones((2, length, 3), np.float32) * x["a"][..., None]

    def local(x, positions):
        return relayout(x, *layouts, "context", positions=positions)

    whole = jax.shard_map(
        local, mesh=split.ring_over(4), in_specs=SPLIT, out_specs=SPLIT
    )
    (source, positions), (target, _) = (layout.reorder(x) for layout in layouts)
    out, transpose = jax.vjp(
        lambda x: jax.jit(whole)(x, positions), jax.tree.map(jnp.asarray, source)
    )
    jax.tree.map(np.testing.assert_array_equal, out, target)
    (back,) = transpose(out)
    jax.tree.map(np.testing.assert_array_equal, back, source)


def test_relayout_refuses_another_sequence():
    with pytest.raises(ValueError, match=r"from 8 tokens on 2 ranks to 9 on 2\. Pass"):
        relayout(jnp.ones(4), Layout("zigzag", 2, 8), Layout("zigzag", 2, 9), "i")


def test_hessian_vector_products_pass_through_relayout():
    layouts = Layout("zigzag", 2, 5), Layout("contiguous", 2, 5)
    x, positions = layouts[0].reorder(jnp.arange(1.0, 6), axis=0)

    def cubes(x):
        def local(x, positions):
            return relayout(x, *layouts, "context", positions=positions, axis=0)

        split_tokens = jax.P("context")
        moved = jax.shard_map(
            local, mesh=split.ring_over(2), in_specs=split_tokens,
            out_specs=split_tokens,
        )  # fmt: skip
        return (moved(x, positions) ** 3).sum()

    product = jax.jit(lambda x: jax.jvp(jax.grad(cubes), (x,), (jnp.ones_like(x),))[1])
    np.testing.assert_allclose(product(x), 6 * x)


@pytest.mark.parametrize(
    ("names", "length"),
    [(("striped", "zigzag"), 6), (("striped",) * 2, 6), (("contiguous", "zigzag"), 2)],
)
def test_relayout_leaves_nothing_in_padding_and_gives_it_no_gradient(names, length):
    source, target = (Layout(name, 4, length) for name in names)
    _, positions = source.reorder(np.ones((2, length, 3), np.float32))

    def local(x, positions):
        return relayout(x, source, target, "context", positions=positions)

    whole = jax.shard_map(
        local, mesh=split.ring_over(4), in_specs=SPLIT, out_specs=SPLIT
    )
    x = jnp.ones((*positions.shape, 3))
    out, transpose = jax.vjp(lambda x: whole(x, positions), x)
    (grad,) = transpose(jnp.ones_like(out))
    for found, layout in ((out, target), (grad, source)):
        is_token = layout.all_positions() < length
        np.testing.assert_array_equal(found, np.ones_like(x) * is_token[:, None])
