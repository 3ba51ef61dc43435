"""What a table says that ranks see is what a causal mask within documents lets them."""

import itertools

import numpy as np
import pytest

from jaxcomm.attention import document_layout, documents, segment_ids_of
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.table import (
    ALL,
    FEW,
    FEWEST,
    MANY,
    NONE,
    OWN,
    SHARES,
    Table,
    few,
    listed,
    way_of,
)
from jaxcomm.attention.visibility import table_of

TOKENS = 160


def _tokens_of(parts, count):
    """Return the few tokens, by where each part of them begins."""
    found = []
    for (begin, token), end in zip(parts.T, [*parts[0, 1:], count], strict=True):
        found += range(token, token + max(min(end, count) - begin, 0))
    return np.array(found)


def _pairs(starts, queries, keys, is_causal):
    """Return what the packed kernel computes, bool (queries, keys)."""
    seen = np.zeros((queries, keys), bool)
    begins = list(zip(*starts, strict=True))
    assert begins[-1] == (queries, keys) or (not is_causal and begins[-1][0] == queries)
    for (query, key), (end, key_end) in itertools.pairwise(begins):
        shape = end - query, key_end - key
        assert min(shape) >= 0
        # Causal ones are aligned at their ends.
        assert not is_causal or 0 in shape or shape[0] == shape[1]
        block = np.ones(shape, bool)
        seen[query:end, key:key_end] = np.tril(block) if is_causal else block
    return seen


def _said(tables, way, size, tokens):
    """Return which keys queries see by the tables, bool (size, T, size, T)."""
    found = np.zeros((size, tokens, size, tokens), bool)
    for rank in range(size):
        own = _pairs(tables.own[rank], tokens, tokens, is_causal=True)
        found[rank, :, rank] = own
    if way not in SHARES:
        return found
    one, count = tables.few[list(SHARES).index(way)], few(tokens, way)
    some = listed(count, size)
    every = np.arange(tokens)
    picked = [
        [every if way == MANY else _tokens_of(x[rank], count) for x in one[:2]]
        for rank in range(size)
    ]
    for of_rank in picked:
        assert all(len(set(x.tolist())) == count for x in of_rank)
    for rank, (queries, _) in enumerate(picked):
        seen = _pairs(one.starts[rank], count, some, is_causal=False)
        for number, key in enumerate(_tokens_of(one.listed[rank], some)):
            other, key = divmod(key, count)
            of_key = seen[:, number]
            assert other not in (rank, size) or not of_key.any()
            if other == size:  # What follows the last.
                break
            at = queries, other, picked[other][1][key]
            assert not (found[rank][at] & of_key).any()
            found[rank][at] |= of_key
    return found


@pytest.mark.parametrize("size", [2, 4, 8])
def test_few_tokens_see_what_the_mask_lets_them(size):
    rng, ways = np.random.default_rng(size), set()
    for turn in range(80):
        cuts = np.sort(rng.choice(TOKENS, rng.integers(0, 30), replace=False))
        lengths = np.diff([0, *cuts, TOKENS])
        kind = ("contiguous", "zigzag", "documents", "one is cut")[turn % 4]
        if kind == "documents":
            at = document_layout(lengths.tolist(), size).order
        elif kind == "one is cut":
            cut = {int(rng.integers(len(lengths)))}
            at = documents._deal(lengths, size, cut)
        else:
            at = Layout(kind, size, TOKENS).all_positions().reshape(size, -1)
        ids = segment_ids_of(lengths.tolist())
        if turn % 5 == 0:
            ids = np.where(ids == ids[turn % TOKENS], -1, ids)
        tables = Table.of(
            table_of(at.reshape(-1), ids[at].reshape(-1), size).reshape(size, -1),
            size,
            at.shape[1],
        )
        way = int(tables.way[0])
        ways.add(way)
        if way == NONE:
            continue
        ids, positions = ids[at], at
        seen = (ids[:, :, None, None] == ids) & (ids >= 0)
        seen &= positions[:, :, None, None] >= positions
        said = _said(tables, way, size, at.shape[1])
        if way == ALL:
            ranks = np.arange(size)
            said, seen = (x[ranks, :, ranks] for x in (said, seen))
        np.testing.assert_array_equal(said, seen)
    assert {OWN, FEWEST, FEW, MANY} <= ways


def test_keys_that_three_pieces_of_a_rank_see_are_in_no_list():
    """Their gradients are added up as those of two."""
    pieces = {0: [(0, 40)], 1: [(40, 53), (63, 76), (86, 100)]}
    pieces |= {2: [(53, 63), (100, 130)], 3: [(76, 86), (130, 160)]}
    at = [np.concatenate([np.arange(*x) for x in pieces[rank]]) for rank in range(4)]
    ids = segment_ids_of([100, 30, 30])
    at = np.concatenate(at).astype(np.int32)
    assert way_of(table_of(at, ids[at], 4), 4) == ALL
