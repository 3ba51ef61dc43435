"""Causal attention by each strategy and by "auto"."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxcomm
from bench.gpu import masks, sizes
from bench.gpu.attention import SPLIT, random_block
from bench.gpu.one_kernel import best_kernel, one_kernel
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.attention.strategies.ulysses import Usp

# What "auto" may lose against the fastest.
_LEAST_OF_AUTO = 0.97
# Of more tokens one layer takes long enough, and all that a GPU has.
_MANY = 1 << 15
# Of the longest, a call of one strategy takes seconds.
_ROUNDS, _ROUNDS_OF_LONG = 5, 2
_DOCUMENTS = 24
# Of the calls in a round, over all layers.
_TOKENS = 1 << 19


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention by several programs.

    Attributes:
      name: what it is.
      by: attention inside ``shard_map``, by what it is called.
      layers: in one program, each with keys of its own.
      lengths: of documents, or ().
      auto: which of the programs is what "auto" takes, or None.
      value_size: of the heads of values, if they differ from those of keys. Then the
        output is no query, and there is one layer.
    """

    name: str
    by: dict[str, Callable]
    layers: int
    lengths: tuple[int, ...] = ()
    auto: str | None = None
    value_size: int | None = None


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields seconds of a layer, against one kernel over the whole divided by ranks."""
    timer = _with(timer, _ROUNDS)
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.tokens:
        often = timer if tokens <= sizes.MOST_ALONE else _with(timer, _ROUNDS_OF_LONG)
        yield from of_case(often, tokens, causal(timer, tokens))
    longest = max(timer.sizes.up_to(_MANY))
    for case in documents(timer, longest):
        yield from of_case(timer, longest, case)
    *heads, value_size = timer.sizes.latent
    latent = dataclasses.replace(timer.sizes, heads=tuple(heads))
    of_latent = dataclasses.replace(timer, sizes=latent)
    for tokens in timer.sizes.up_to(sizes.MOST_ALONE):
        yield from of_case(of_latent, tokens, causal(of_latent, tokens, value_size))


def _with(timer, rounds) -> Timer:
    rounds = min(timer.sizes.rounds, rounds)
    return dataclasses.replace(
        timer, sizes=dataclasses.replace(timer.sizes, rounds=rounds)
    )


def causal(timer, tokens, value_size=None) -> Case:
    """Returns layers of causal attention by each strategy."""
    heads, key_heads, size = timer.sizes.heads
    compare = functools.partial(
        jaxcomm.attention.compare_strategies,
        jaxcomm.Layout("zigzag", timer.size, tokens),
        heads=heads, key_heads=key_heads, head_size=size, value_size=value_size,
        is_causal=True,
    )  # fmt: skip
    strategies = {"ring": "ring", **strategies_of(compare, timer.size)}
    by = {
        name: functools.partial(masks.attend, schedule="zigzag", strategy=strategy)
        for name, strategy in strategies.items()
    }
    name = f"causal {sizes.length(tokens)}"
    layers = timer.sizes.layers if tokens <= _MANY else 1
    if value_size is not None:
        name, layers = f"{name}, heads of {size} and {value_size}", 1
    return Case(name, by, layers, auto=compare().chosen, value_size=value_size)


def documents(timer, tokens) -> Iterator[Case]:
    """Yields one layer of documents, which waits for the host, and several."""
    lengths = masks.log_normal_lengths(tokens, _DOCUMENTS)
    heads, key_heads, size = timer.sizes.heads
    chosen = jaxcomm.attention.compare_strategies(
        jaxcomm.attention.document_layout(lengths, timer.size), heads=heads,
        key_heads=key_heads, head_size=size, is_causal=True, has_documents=True,
    ).chosen  # fmt: skip
    programs = {
        f"{schedule} {strategy}": functools.partial(
            masks.attend, schedule=schedule, strategy=strategy, lengths=lengths
        )
        for schedule, strategy in (("documents", chosen), ("contiguous", "all_gather"))
    }
    name, auto = (
        f"{_DOCUMENTS} documents in {sizes.length(tokens)}",
        next(iter(programs)),
    )
    yield Case(name, programs, 1, lengths, auto)
    layers = timer.sizes.layers // 2
    name = f"{name}, {layers} layers"
    yield Case(name, {auto: programs[auto]}, layers, lengths, auto)


def of_case(timer, tokens, case) -> Iterator[Figure]:
    """Yields what the programs of a case take, against one kernel; and what auto."""
    query, *_ = random_block(timer, tokens)
    keys = [
        (key, value[..., : case.value_size])
        for _, key, value in (random_block(timer, tokens) for _ in range(case.layers))
    ]
    given = query, keys
    is_first = jax.process_index() == 0
    # What has no documents can be scaled.
    shorter = tokens if case.lengths else min(tokens, sizes.MOST_ALONE)
    alone = jax.tree.map(
        lambda x: (
            timer.random_alone((1, shorter, *x.shape[2:]), "bfloat16")
            if is_first
            else None
        ),
        given,
    )
    kernel = best_kernel(timer, needs_documents=bool(case.lengths))
    parts = 1 if timer.shares_gpu else timer.size
    over = "the whole sequence"
    if shorter < tokens:
        over = f"{sizes.length(shorter)}, times {(tokens // shorter) ** 2}"
    limit = f"one {kernel} kernel over {over}, divided by {parts}"
    one = one_kernel(kernel, case.lengths)
    if case.value_size:
        limit, one = f"{limit}, values padded", _padded(one)
    mine = {
        name: timer.program(in_layers(attend), (SPLIT, SPLIT))
        for name, attend in case.by.items()
    }
    mine[limit] = in_layers(one)
    programs = {
        (what, name): (transform(each), alone if name == limit else given)
        for what, transform in (
            ("forward", jax.jit),
            ("with gradients", with_gradients),
        )
        for name, each in mine.items()
        if is_first or name != limit
    }
    compiled = compile_all(programs)
    for what in ("forward", "with gradients"):
        calls = {name: compiled.get((what, name)) for name in mine}
        # As steps follow one another: starting a program of 2 ms adds a quarter.
        calls_in_a_round = max(1, min(8, _TOKENS // (tokens * case.layers)))
        seconds = {
            name: of / case.layers
            for name, of in timer.by_turns(
                calls, calls_in_a_round, alone=[limit]
            ).items()
        }
        seconds[limit] *= (tokens / shorter) ** 2 / parts
        name = f"{case.name}, {what}"
        for by in case.by:
            ratio = seconds[limit] / seconds[by]
            yield Figure(f"{name}, {by}", seconds[by], limit, seconds[limit], ratio)
        if case.auto:
            fastest = min(case.by, key=lambda by: seconds[by])
            times = seconds[case.auto], seconds[fastest]
            yield Figure(
                f"{name}, auto", times[0], "the fastest", times[1],
                times[1] / times[0], _LEAST_OF_AUTO,
                f"auto takes {case.auto}, the fastest is {fastest}",
            )  # fmt: skip


def _padded(attend):
    """Returns attention that fills up the heads of values, and cuts the output."""

    def run(query, key, value):
        missing = key.shape[3] - value.shape[3]
        padded = jax.numpy.pad(value, [(0, 0)] * 3 + [(0, missing)])
        return attend(query, key, padded)[..., : value.shape[3]]

    return run


def in_layers(attend):
    """Returns several attentions, each of the last one's output and keys of its own."""

    def run(query, keys):
        for key, value in keys:
            query = attend(query, key, value)
        return query

    return run


def with_gradients(function):
    """Returns the sum of what layers return, with the gradients of all they take."""

    def loss(*given):
        return function(*given).astype("float32").sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def compile_all(programs) -> dict[Any, Callable[[], Any]]:
    """Returns thunks of programs and what they are given, compiled all at once."""
    lowered = {name: f.lower(*given) for name, (f, given) in programs.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(
            zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True)
        )
    return {name: thunk(found[name], *programs[name][1]) for name in programs}


def strategies_of(compare, size: int) -> dict[str, str | Strategy]:
    """Returns the possible strategies but the ring, USP for each width.

    Args:
      compare: ``jaxcomm.attention.compare_strategies`` of the attention.
      size: the number of ranks.
    """
    found: dict[str, str | Strategy] = {
        name: name
        for name, row in compare().rows.items()
        if name not in ("ring", "usp") and row.why_not is None
    }
    for width in (n for n in range(2, size) if size % n == 0):
        groups = size // width
        if compare(axis_sizes=(groups, width)).rows["usp"].why_not is None:
            found[f"usp of {groups} x {width}"] = Usp(width)
    return found
