"""What it costs that ranks see keys of others' documents, for ``document_layout``."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

import jaxcomm
from bench import units
from bench.gpu import sizes, strategies
from bench.gpu.attention import SPLIT, random_block
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer
from bench.tokens import tokens_of
from jaxcomm.attention import table

# What is sent, and how it is called. The documents below let each of them serve.
WAYS = {
    table.FEWEST: "an eighth of the tokens",
    table.FEW: "a quarter of the tokens",
    table.MANY: "all keys in one call",
    table.ALL: "all keys around a ring",
}
# Whole documents of each rank.
_WHOLE = 4


def lengths_of(tokens: int, size: int, is_cut: bool) -> tuple[int, ...]:
    """Returns lengths of documents, of which a short one lies across each border.

    Args:
      tokens: of all ranks.
      size: number of ranks.
      is_cut: whether these are one document each, or one on either side.
    """
    local = tokens // size
    across = local // 16
    edges = {rank * local + at for rank in range(size) for at in (-across, across)}
    edges |= {tokens} if is_cut else {rank * local for rank in range(1, size + 1)}
    step = (local - 2 * across) // _WHOLE
    edges |= {
        rank * local + across + number * step
        for rank in range(size)
        for number in range(_WHOLE)
    }
    return tuple(np.diff(sorted({0, *(x for x in edges if x > 0)})).tolist())


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields what each way costs, with gradients, as keys that a query sees."""
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.up_to(sizes.MOST_ALONE):
        yield from _of_length(timer, tokens)


def _of_length(timer, tokens):
    query, *_ = random_block(timer, tokens)
    layers = max(1, timer.sizes.layers // 2)
    keys = [tuple(random_block(timer, tokens)[1:]) for _ in range(layers)]
    layout = jaxcomm.Layout("contiguous", timer.size, tokens)
    whole, cut = (lengths_of(tokens, timer.size, is_cut) for is_cut in (False, True))
    programs = {}
    for way, lengths in {None: whole, **dict.fromkeys(WAYS, cut)}.items():
        by = functools.partial(attend, lengths=lengths, way=way)
        program = timer.program(strategies.in_layers(by), (SPLIT, SPLIT))
        programs[way] = strategies.with_gradients(program), (query, keys)
    calls = strategies.compile_all(programs)
    seconds = timer.by_turns(calls, max(1, 2**15 // tokens))
    within = np.concatenate([np.arange(1, n + 1) for n in whole])
    seen = within.reshape(timer.size, -1).sum(1).max() / layout.local_length
    a_key = seconds[None] / seen
    for way, name in WAYS.items():
        price = (seconds[way] - seconds[None]) / a_key
        yield timer.finding(
            f"documents in {sizes.length(tokens)}, {timer.size} ranks: {name}",
            f"costs {price:.0f} keys a token beside the {seen:.0f} that it sees, in "
            f"{units.seconds(seconds[None] / layers)} a layer with gradients",
            price=price,
            seen=seen,
        )


def attend(q, k, v, *, lengths, way):
    """Attend causally within documents over the axis "i", by a ring.

    Args:
      q, k, v: (1, T, N, D), (1, T, K, D) and (1, T, K, D), of this rank.
      lengths: of the documents.
      way: one of :data:`WAYS`, or None for what the documents need.
    """
    size = jax.lax.axis_size("i")
    layout = jaxcomm.Layout("contiguous", size, size * q.shape[1])
    ids = np.repeat(np.arange(len(lengths)), lengths)
    tokens = tokens_of(layout, "i", ids)
    if way is not None:
        sizes = tokens.sizes and tokens.sizes._replace(keys=layout.length)
        tokens = dataclasses.replace(tokens, way=way, sizes=sizes)
    return jaxcomm.ring_attention(q, k, v, "i", tokens, is_causal=True, strategy="ring")
