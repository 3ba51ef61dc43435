"""Programs that know what is sent of documents choose nothing, and wait for nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options
from packed_documents import (
    AGAIN,
    ALL,
    FEWEST,
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
from jaxcomm.attention import segment_ids_of, table

pytestmark = pytest.mark.usefixtures("called")

EACH_WAY = [WHOLE, FEWEST, SOME, ALL]


def with_gradients(size, strategy="ring"):
    """Return attention with its gradients: of tokens, the output's one, and arrays."""

    def local(tokens, *arrays):
        return jaxcomm.ring_attention(
            *arrays, "context", tokens, is_causal=True, implementation="flash",
            backend="xla", strategy=strategy, local_window_size=window_of(strategy),
        )  # fmt: skip

    whole = split.sharded(local, size, split.SPLIT)

    def both(tokens, grad, *arrays):
        out, back = jax.vjp(functools.partial(whole, tokens), *arrays)
        return out, *back(grad)

    return jax.jit(both)


@pytest.mark.parametrize(
    ("lengths", "many_are"),
    [*((lengths, "one call") for lengths in EACH_WAY), (ALL, "ring")],
    indirect=["many_are"],
)
def test_agreed_tokens_choose_nothing(lengths, many_are):
    arrays, (grad, _) = arrays_of()
    layout = jaxcomm.Layout("contiguous", SIZE, TOKENS)

    given = [np.asarray(x) for x in (grad, *arrays)]
    given, tokens = layout.reorder(given, segment_ids=ids_of(lengths))
    tokens = tokens.agreed()
    assert tokens.way == EACH_WAY.index(lengths)
    program = with_gradients(SIZE).lower(tokens, *given)
    assert "stablehlo.case" not in program.as_text()
    program = program.compile()
    found = program(tokens, *given)
    options = Options(is_causal=True, query_ids=ids_of(lengths))
    split.assert_results(found, arrays, grad, options, LIMIT)
    # Other documents, and more than is sent.
    other_ids = tokens.segment_ids.copy()
    other_ids[0, 30] += 50
    longer = layout.reorder(given, segment_ids=ids_of([TOKENS]))[1]
    is_less = lengths is not ALL
    for wrong in (
        dataclasses.replace(tokens, segment_ids=other_ids),
        *[dataclasses.replace(longer, way=tokens.way, sizes=tokens.sizes)] * is_less,
    ):
        for x in program(wrong, *given):
            assert np.isnan(np.asarray(x, np.float32)).reshape(SIZE, -1)[2].all()


@pytest.mark.parametrize(
    ("lengths", "knows"),
    [
        *((lengths, True) for lengths in (WHOLE, SOME, ALL, PADDED)),
        # A number that comes again, behind another document or behind padding.
        (AGAIN, False),
        (np.where(np.arange(TOKENS) == 23, -1, 0), False),
    ],
)
def test_agreed_tokens_have_a_border(lengths, knows):
    """Where documents are whole nothing is sent."""
    ids = np.concatenate([ids_of(lengths), ids_of(WHOLE)])
    layout = jaxcomm.Layout("contiguous", SIZE, TOKENS)
    arrays, (grad, _) = arrays_of(2)
    given = [np.asarray(x) for x in (grad, *arrays)]
    given, tokens = layout.reorder(given, segment_ids=ids)
    tokens = tokens.agreed()
    assert tokens.sizes.are_mixed != knows
    program = with_gradients(SIZE, "halo").lower(tokens, *given)
    text = program.as_text()
    assert ("stablehlo.case" in text) != knows
    assert ("collective_permute" in text) == (lengths is not WHOLE)
    program = program.compile()
    options = Options(is_causal=True, query_ids=ids, window=window_of("halo"))
    found = program(tokens, *given)
    split.assert_results(found, arrays, grad, options, LIMIT)
    if not knows:
        return
    # Documents that the table does not say. And tables of more than is sent, or of a
    # number that comes again.
    other_ids = np.where(np.arange(TOKENS) == 30, 50, ids)
    wrong = [(dataclasses.replace(tokens, segment_ids=other_ids), 2)]
    for each, rank in ([TOKENS], 2), (AGAIN, 3):
        ids = np.concatenate([ids_of(each)] * 2)
        other = layout.reorder(given, segment_ids=ids)[1].agreed()
        if other.way > tokens.way or other.sizes.are_mixed:
            known = {"way": tokens.way, "sizes": tokens.sizes}
            wrong.append((dataclasses.replace(other, **known), rank))
    for of, rank in wrong:
        is_token = (np.arange(TOKENS) // 12 == rank) & (of.segment_ids >= 0)
        for x in program(of, *given):
            assert np.isnan(np.asarray(x, np.float32)[is_token]).all()


@pytest.mark.parametrize("many_are", ["one call", "ring"], indirect=True)
def test_kernels_are_told_how_long_documents_are(many_are):
    """What is longer a kernel leaves out. It is told of a fourth of the tokens."""
    lengths = [300, 17, 800, 200, 531, 900, 90, 1100, 202]
    layout = jaxcomm.Layout("contiguous", SIZE, sum(lengths))
    rng = np.random.default_rng(0)
    shapes = [(1, layout.length, n, 8) for n in (2, 1, 1, 2)]
    *arrays, grad = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    ids = segment_ids_of(lengths)[None]
    given = [np.asarray(x) for x in (grad, *arrays)]
    given, tokens = layout.reorder(given, segment_ids=ids)
    tokens = tokens.agreed()
    assert tokens.way == table.MANY
    assert tokens.sizes == (16, 1035, 1035, False)

    program = with_gradients(SIZE).lower(tokens, *given)
    text = program.as_text()
    assert ("collective_permute" in text) == (many_are == "ring")
    assert "max_seqlen_k = 1035" in text
    assert "max_seqlen_k = 4140" not in text
    found = program.compile()(tokens, *given)
    options = Options(is_causal=True, query_ids=ids)
    split.assert_results(found, arrays, grad, options, LIMIT)


@pytest.mark.parametrize("lengths", [[2] * 40, [40, 40]])
def test_more_or_longer_documents_than_agreed_are_nan(lengths, monkeypatch):
    """Also where a kernel leaves rows as they were."""
    monkeypatch.setenv("JAXCOMM_FAKE_FLASH_NUMBERS", "1")
    layout = jaxcomm.Layout("contiguous", 2, 80)
    arrays = [np.ones((1, 80, n, 8), "bfloat16") for n in (2, 2, 1, 1)]

    both = with_gradients(2)

    def run(tokens, *arrays):
        found = both(tokens, *arrays)
        return np.concatenate([np.float32(x).ravel() for x in found])

    given, tokens = layout.reorder(arrays, segment_ids=segment_ids_of([10] * 8)[None])
    tokens = tokens.agreed()
    assert tokens.sizes[:2] == (16, 10)
    assert np.isfinite(run(tokens, *given)).all()
    _, other = layout.reorder(arrays, segment_ids=segment_ids_of(lengths)[None])
    assert other.agreed().way == tokens.way
    wrong = dataclasses.replace(other, way=tokens.way, sizes=tokens.sizes)
    assert np.isnan(run(wrong, *given)).all()
    assert np.isfinite(run(other.agreed(), *given)).all()
