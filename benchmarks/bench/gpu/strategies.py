"""Causal attention by each strategy against the ring, and what "auto" chooses."""

import functools
from collections.abc import Iterator

import jaxcomm
from bench.gpu import sizes
from bench.gpu.attention import (
    SPLIT,
    attend_in_zigzag,
    forward_and_backward,
    random_block,
)
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.attention.strategies.ulysses import Usp

# What "auto" may lose against the fastest.
_LEAST_OF_AUTO = 0.97


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields figures for each length, forward and then with backward."""
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.tokens:
        yield from _of_length(timer, tokens)


def _of_length(timer, tokens):
    heads, key_heads, size = timer.sizes.heads
    block = random_block(timer, tokens)
    calls = sizes.calls_in_a_round(tokens)
    compare = functools.partial(
        jaxcomm.attention.compare_strategies,
        jaxcomm.Layout("zigzag", timer.size, tokens),
        heads=heads, key_heads=key_heads, head_size=size, is_causal=True,
    )  # fmt: skip
    others = strategies_of(compare, timer.size)
    for what, transform in (
        ("forward", lambda f: f),
        ("forward and backward", forward_and_backward),
    ):
        name = f"causal attention {sizes.length(tokens)}, {what}"

        def by(strategy, transform=transform):
            attend = functools.partial(attend_in_zigzag, strategy=strategy)
            return thunk(transform(timer.program(attend, SPLIT)), *block)

        programs = {"ring": by("ring")}
        seconds = {"ring": 1.0}
        for other, strategy in others.items():
            programs[other] = by(strategy)
            figure = timer.compare(
                f"{name}, {other}", programs[other], "ring", programs["ring"],
                calls=calls,
            )  # fmt: skip
            yield figure
            seconds[other] = 1 / min(timer.agree(figure.ratio))
        fastest = min(seconds, key=lambda of: seconds[of])
        yield timer.compare(
            f"{name}, auto ({compare().chosen})", by("auto"),
            f"{fastest}, the fastest", programs[fastest],
            calls=calls, least=_LEAST_OF_AUTO,
        )  # fmt: skip


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
