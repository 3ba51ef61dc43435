"""Tokens are data: they go wherever JAX takes arrays, and carry ids and lengths."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import document_layout, segment_ids_of, table
from jaxcomm.attention.layout import Layout
from jaxcomm.communicator import rendezvous

SIZE, LENGTH = 4, 13
ROWS = [[[5, 8], [13]], [[2, 11], [6, 3, 4]]]
X = np.random.default_rng(0).standard_normal((2, LENGTH, 2, 4)).astype(np.float32)
IDS = np.stack([segment_ids_of([4, 9]), segment_ids_of([7, 4], LENGTH)])
LENGTHS = np.array([12, LENGTH])


def layouts_of(name):
    """Return layouts of the same shapes, for one batch each."""
    if name == "documents of rows":
        return [document_layout(of, SIZE) for of in ROWS]
    return [Layout(name, SIZE, LENGTH)] * 2


every_layout = pytest.mark.parametrize("name", ["zigzag", "documents of rows"])


@every_layout
def test_batches_are_stacked_split_scanned_and_mapped(make_mesh, name):
    """As micro-batches of a training step are: whatever they hold, one program."""
    traces, spec = [], jax.P(None, "data", "context")

    @jax.vmap
    def attend(x, tokens):
        return jaxcomm.ring_attention(x, x, x, "context", tokens, is_causal=True)

    def one(_, batch):
        return None, (attend(*batch), batch[1])

    def local(*batches):
        traces.append(None)
        return jax.lax.scan(one, None, batches)[1]

    mesh = make_mesh(data=2, context=SIZE)
    whole = jax.jit(split.sharded(local, None, spec, spec, mesh))
    ids = IDS, IDS[::-1]
    batches = [
        layout.reorder(X, segment_ids=of, lengths=LENGTHS)
        for layout, of in zip(layouts_of(name), ids, strict=True)
    ]
    for order in ([0, 1], [1, 0]):
        given = jax.tree.map(lambda *of: np.stack(of), *[batches[i] for i in order])
        found, held = whole(*given)
        jax.tree.map(np.testing.assert_array_equal, held, given[1])
        for at, i in enumerate(order):
            tokens = jax.tree.map(lambda leaf, at=at: leaf[at], held)
            options = dense.Options(
                is_causal=True, query_ids=ids[i], query_lengths=LENGTHS,
                key_lengths=LENGTHS,
            )  # fmt: skip
            expected = dense.attention(X, X, X, options)
            split.assert_close([tokens.restore(found[at])], expected)
    assert len(traces) == 1


def test_a_tree_holds_positions_and_ids_by_name_and_whatever_jax_puts_there():
    _, tokens = layouts_of("documents of rows")[0].reorder(X, segment_ids=IDS)
    leaves, tree = jax.tree_util.tree_flatten_with_path(tokens)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".positions", ".segment_ids", ".table"]
    assert jax.tree.unflatten(tree, ["a", "b", "c"]).segment_ids == "b"
    without = dataclasses.replace(tokens, segment_ids=None, table=None)
    assert len(jax.tree.leaves(without)) == 1
    assert jax.tree.structure(without) != tree
    shapes = jax.eval_shape(lambda tokens: tokens, tokens)
    assert shapes.positions.shape == (2, SIZE * 4)
    assert shapes.layout == tokens.layout
    assert jax.tree.map(lambda _: jax.P("data"), tokens).positions == jax.P("data")


@every_layout
@pytest.mark.parametrize("arrays", [np, jnp])
@pytest.mark.parametrize("ids", [np, jnp])
def test_tokens_are_where_the_layout_says_and_numpy_if_all_is(name, arrays, ids):
    layout = layouts_of(name)[0]
    x, given = arrays.asarray(X), {"segment_ids": ids.asarray(IDS), "lengths": LENGTHS}
    dealt, tokens = layout.reorder(x, **given)
    assert isinstance(dealt, np.ndarray) == (arrays is np)
    assert isinstance(tokens.positions, np.ndarray) == (arrays is np)
    assert isinstance(tokens.segment_ids, np.ndarray) == (arrays is ids is np)
    assert tokens.positions.dtype == tokens.segment_ids.dtype == np.int32
    held = np.broadcast_to(layout.all_positions(), (2, 16))
    np.testing.assert_array_equal(tokens.positions, np.where(held < LENGTH, held, -1))
    expected = np.full((2, 16), -1)
    expected[:, :LENGTH] = np.where(np.arange(LENGTH) < LENGTHS[:, None], IDS, -1)
    expected = np.take_along_axis(expected, held, 1)
    np.testing.assert_array_equal(tokens.segment_ids, expected)
    assert layout.reorder(x)[1].segment_ids is None


@every_layout
@pytest.mark.parametrize("arrays", [np, jnp])
@pytest.mark.parametrize("shift", [1, 2, LENGTH + 3])
def test_labels_are_of_tokens_behind_in_the_document(name, arrays, shift):
    """And there is none behind another document, though it has the same id."""
    layout = layouts_of(name)[0]
    ids = np.array([[0, 0, 1, 0, 0, 0, 2, 3, 3, 3, 3, -1, 4], [7] * 13])[:, :LENGTH]
    x = np.arange(2 * LENGTH).reshape(2, LENGTH)
    expected = np.full((2, 16), -1)
    for row, last in enumerate((LENGTH, 9)):
        of = ids[row]
        for t in range(last - shift):
            if of[t] >= 0 and (of[t : t + shift + 1] == of[t]).all():
                expected[row, t] = x[row, t + shift]
    given = {"segment_ids": ids, "lengths": [LENGTH, 9], "shift": shift}
    held = np.broadcast_to(layout.all_positions(), (2, 16))
    of_x = {"ids": arrays.asarray(x), "wide": arrays.ones((2, LENGTH, 3))}
    labels, tokens = layout.reorder(of_x, **given)
    of_held = np.take_along_axis(expected, held, 1)
    np.testing.assert_array_equal(labels["ids"], of_held)
    np.testing.assert_array_equal(labels["wide"], np.stack([of_held >= 0] * 3, -1))
    plain = layout.reorder(x, segment_ids=ids, lengths=[LENGTH, 9])[1]
    # Of numpy arrays alone there is a table.
    tokens = dataclasses.replace(tokens, table=plain.table)
    jax.tree.map(np.testing.assert_array_equal, tokens, plain)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_ids_and_lengths_of_any_integers_are_those_of_int32(dtype):
    layout = Layout("zigzag", SIZE, LENGTH)
    ids = np.maximum(IDS, 0)

    def reorder(dtype):
        of = {"segment_ids": ids.astype(dtype), "lengths": LENGTHS.astype(dtype)}
        return layout.reorder(X, **of)

    found, expected = reorder(dtype), reorder("int32")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found[1].segment_ids.dtype == np.int32
    if np.iinfo(dtype).max > 2**32 - 1:
        # Cut to 32 bits, this is a length of 0.
        long = layout.reorder(X, segment_ids=ids, lengths=np.array(2**32, dtype))
        assert (long[1].segment_ids >= 0).sum() == 2 * LENGTH


def test_one_row_of_ids_and_one_length_are_for_all_rows():
    layout = Layout("zigzag", SIZE, LENGTH)
    all_rows = layout.reorder(X, segment_ids=np.stack([IDS[1]] * 2), lengths=[9, 9])
    for ids, length in ((IDS[1], 9), (IDS[1].tolist(), np.uint8(9))):
        found = layout.reorder(X, segment_ids=ids, lengths=length)
        jax.tree.map(np.testing.assert_array_equal, found, all_rows)
    alone = layout.reorder(X[0], 0, segment_ids=IDS[1], lengths=9)[1]
    np.testing.assert_array_equal(alone.segment_ids, all_rows[1].segment_ids[0])
    of_length = layout.reorder(X, lengths=9)[1].segment_ids
    assert ((of_length == 0).sum(1) == 9).all()


@every_layout
def test_reorder_within_a_program_gives_the_same_tokens(name):
    """Traced lengths may have 64 bits. Ids may not: see the refusals."""
    given = layouts_of(name)[0], X, IDS, LENGTHS

    def reorder(layout, x, ids, lengths):
        return layout.reorder(x, segment_ids=ids, lengths=lengths)

    with jax.enable_x64(True):
        found = jax.jit(reorder)(*given)
    x, tokens = reorder(*given)
    assert found[1].table is None
    tokens = dataclasses.replace(tokens, table=None)
    jax.tree.map(np.testing.assert_array_equal, found, (x, tokens))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found[1])} == {"int32"}


def test_every_kind_of_padding_is_padding():
    layout, x = Layout("zigzag", 2, 7), np.zeros((2, 7))
    ids = np.array([[0, 0, 0, 1, 1, 1, -2]] * 2)
    for xp in (np, jnp):
        _, tokens = layout.reorder(xp.asarray(x), segment_ids=ids, lengths=[5, 7])
        found = np.asarray(tokens.is_padding)
        assert found.shape == (2, layout.size * layout.local_length)
        expected = layout.reorder(np.array([[1] * 5 + [0] * 2, [1] * 6 + [0]]))[0] == 0
        np.testing.assert_array_equal(found, expected)
    _, plain = layout.reorder(x)
    np.testing.assert_array_equal(plain.is_padding, layout.reorder(x + 1)[0] == 0)
    with pytest.raises(TypeError, match="no positions"):
        _ = jaxcomm.Tokens(layout, None).is_padding


def test_processes_agree_on_what_serves_all(monkeypatch):
    layout, ids = Layout("contiguous", 2, 8), np.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    _, tokens = layout.reorder(np.zeros((1, 8)), segment_ids=ids)
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    assert tokens.agreed().way == tokens.agreed(mesh).way == table.OWN
    assert tokens.agreed(mesh).sizes == (16, 4, 8, False)
    for other, way, keys in (
        ([table.FEW, 1, 99, 1, False], table.FEW, 8),
        ([table.MANY, 1, 99, 7, True], table.MANY, 7),
        ([table.NONE, 0, 0, 0, False], None, None),
    ):
        monkeypatch.setattr(
            rendezvous, "exchange", lambda *given, other=other: {0: given[-1], 1: other}
        )
        assert tokens.agreed(mesh).way == way
        assert tokens.agreed(mesh).sizes == (keys and (16, 99, keys, keys == 7))
    without = dataclasses.replace(tokens, table=None)
    assert without.agreed().way is None
    with pytest.raises(TypeError, match="got 'context'"):
        tokens.agreed("context")
    with pytest.raises(TypeError, match="the table is traced"):
        jax.jit(lambda tokens: tokens.agreed())(tokens)


@pytest.mark.parametrize("strategy", ["halo", "ring"])
def test_ranks_compare_what_chooses_their_collectives(strategy):
    """Of an older program's tokens nothing is known: they are taken for mixed."""
    layout, x = Layout("contiguous", 2, 8), np.ones((1, 8, 1, 4), np.float32)
    window = (2, 0) if strategy == "halo" else None
    x, tokens = layout.reorder(x, segment_ids=np.array([[0] * 4 + [1] * 4]))
    tokens = tokens.agreed()

    def lowered(tokens):
        def local(tokens, x):
            return jaxcomm.ring_attention(
                x, x, x, "context", tokens, is_causal=True, strategy=strategy,
                local_window_size=window, backend="host",
            )  # fmt: skip

        return jax.jit(split.sharded(local, 2, split.SPLIT)).lower(tokens, x).as_text()

    older = dataclasses.replace(tokens, sizes=table.Sizes(*tokens.sizes[:3]))
    for of, are_mixed in (tokens, False), (older, True):
        said = f"tokens.sizes.are_mixed={are_mixed}" in lowered(of)
        assert said == (strategy == "halo")
