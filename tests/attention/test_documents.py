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
    np.testing.assert_array_equal(layout.restore(layout.reorder(x)), x)
    assert document_work(layout, lengths).sum() == sum(
        n * (n + 1) // 2 for n in lengths
    )


def test_other_documents_run_the_same_program_and_equal_dense_attention():
    mesh, traces = split.ring_over(4), []

    def local(query, key, value, ids, layout):
        traces.append(layout)
        return jaxcomm.ring_attention(
            query, key, value, axis_name="context", layout=layout, is_causal=True,
            query_segment_ids=ids, return_residual=True,
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=mesh, in_specs=(*[SPLIT] * 4, jax.P()), out_specs=SPLIT
    )

    @jax.jit
    def run(arrays, ids, layout, grads):
        result, transpose = jax.vjp(
            lambda *arrays: whole(*arrays, ids, layout), *arrays
        )
        return *result, *transpose(grads)

    *arrays, grads = split.random_inputs((1, 41, 4, 8), (1, 41, 2, 8))
    for lengths in ([30, 5, 6], [2, 20, 19]):
        layout = document_layout(lengths, 4)
        ids = segment_ids(lengths)[None]
        dealt = jax.tree.map(
            lambda x, layout=layout: layout.reorder(np.asarray(x)),
            (tuple(arrays), ids, tuple(grads)),
        )
        found = run(*dealt[:2], layout, dealt[2])
        options = dense.Options(is_causal=True, query_ids=ids)
        expected = dense.attention(*arrays, options, grads)
        found = [layout.restore(np.asarray(x)) for x in found]
        split.assert_close(found, expected, 1e-5)
    assert len(traces) == 1


def test_segment_ids_are_those_of_the_lengths():
    assert segment_ids([2, 0, 1], 5).tolist() == [0, 0, 2, -1, -1]
    with pytest.raises(ValueError, match="documents of 3 tokens in a sequence of 2"):
        segment_ids([3], 2)
    with pytest.raises(TypeError, match="pass a sequence of integers"):
        segment_ids([1.5])
    with pytest.raises(ValueError, match="no negative length"):
        document_layout([1, -1], 2)


@pytest.mark.parametrize("names", [("zigzag", "contiguous"), ("striped", "documents")])
def test_relayout_moves_tokens_and_its_transpose_moves_them_back(names):
    layouts = [
        document_layout([9, 14, 6], 4) if name == "documents" else Layout(name, 4, 29)
        for name in names
    ]
    x = {"a": np.arange(58.0).reshape(2, 29).astype(np.float32)}
    x["b"] = np.ones((2, 29, 3), np.float32) * x["a"][..., None]

    def local(x):
        return relayout(x, *layouts, "context")

    whole = jax.shard_map(
        local, mesh=split.ring_over(4), in_specs=SPLIT, out_specs=SPLIT
    )
    source, target = (layout.reorder(x) for layout in layouts)
    out, transpose = jax.vjp(jax.jit(whole), jax.tree.map(jnp.asarray, source))
    jax.tree.map(np.testing.assert_array_equal, out, target)
    (back,) = transpose(out)
    jax.tree.map(np.testing.assert_array_equal, back, source)


def test_relayout_refuses_another_sequence():
    with pytest.raises(ValueError, match=r"from 8 tokens on 2 ranks to 9 on 2\. Pass"):
        relayout(jnp.ones(4), Layout("zigzag", 2, 8), Layout("zigzag", 2, 9), "i")
