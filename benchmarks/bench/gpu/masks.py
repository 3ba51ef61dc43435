"""Attention with documents and windows, against one kernel over the whole sequence."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

import jaxcomm
from bench.gpu import sizes
from bench.gpu.attention import SPLIT, forward_and_backward, random_block
from bench.gpu.one_kernel import best_kernel, one_kernel
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk
from bench.tokens import tokens_of
from jaxcomm.attention import document_layout


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention.

    Attributes:
      name: what it is.
      programs: pairs of a schedule and a strategy. ``"documents"`` deals whole
        documents.
      lengths: of its documents, or () for none.
      window: how many tokens a token sees, itself among them; or None.
      more_heads: query and key heads are so many times those of the sizes.
    """

    name: str
    programs: tuple[tuple[str, str], ...]
    lengths: tuple[int, ...] = ()
    window: int | None = None
    more_heads: float = 1


def cases_of(tokens: int) -> list[Case]:
    """Returns what is timed with sequences of a length."""
    contiguous = ("contiguous", "ring"), ("contiguous", "all_gather")
    # Windows of 4,096 and of 512 in 128k.
    window, short = max(tokens // 32, 1), max(tokens // 256, 1)
    return [
        Case("16 documents", contiguous, (tokens // 16,) * 16),
        Case(
            "24 documents of log-normal lengths",
            (("documents", "ring"), contiguous[1]),
            log_normal_lengths(tokens, 24),
        ),
        Case(
            f"a window of {window}",
            (("contiguous", "halo"), ("contiguous", "ulysses")),
            window=window,
        ),
        # What a large project trains: 48 query and 12 key heads.
        Case(
            f"a window of {short} in 32 documents",
            (("contiguous", "halo"),),
            (tokens // 32,) * 32,
            short,
            1.5,
        ),
    ]


def log_normal_lengths(tokens: int, count: int) -> tuple[int, ...]:
    """Returns lengths of documents that are packed into a sequence."""
    rng = np.random.default_rng(0)
    shares = np.sort(rng.lognormal(0, 1, count))
    lengths = np.maximum(shares / shares.sum() * tokens, 1).astype(int)
    lengths[-1] += tokens - lengths.sum()
    rng.shuffle(lengths)
    return tuple(map(int, lengths))


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields figures for each length and case, forward and then with backward."""
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.up_to(sizes.MOST_ALONE):
        for case in cases_of(tokens):
            yield from _of_case(timer, tokens, case)


def _of_case(timer, tokens, case):
    heads = [int(n * case.more_heads) for n in timer.sizes.heads[:2]]
    block = random_block(timer, tokens, *heads)
    is_first = jax.process_index() == 0
    alone = [timer.random_alone(x.shape, "bfloat16") for x in block if is_first]
    kernel = best_kernel(timer, needs_documents=bool(case.lengths))
    one = one_kernel(kernel, case.lengths, case.window)
    parts = 1 if timer.shares_gpu else timer.size
    part = "" if parts == 1 else f", divided by {parts}"
    for schedule, strategy in case.programs:
        ours = functools.partial(
            attend,
            schedule=schedule,
            strategy=strategy,
            lengths=case.lengths,
            window=case.window,
        )
        for what, transform in (
            ("forward", jax.jit),
            ("forward and backward", forward_and_backward),
        ):
            yield timer.compare(
                f"{schedule} {strategy} with {case.name} in {sizes.length(tokens)}, "
                f"{what}",
                thunk(transform(timer.program(ours, SPLIT)), *block),
                f"one {kernel} kernel over the whole sequence{part}",
                thunk(transform(one), *alone) if is_first else None,
                calls=sizes.calls_in_a_round(tokens),
                alone=True,
                share=1 / parts,
                least=0.85,
            )


def attend(q, k, v, *, schedule, strategy, lengths=(), window=None):
    """Attend over the axis "i", causally, to tokens in the order of a layout.

    Args:
      q, k, v: (B, T, N, D), (B, T, K, D) and (B, T, K, D), of this rank.
      schedule, strategy, lengths, window: see :class:`Case`.
    """
    size = jax.lax.axis_size("i")
    if schedule == "documents":
        layout = document_layout(list(lengths), size)
    else:
        layout = jaxcomm.Layout(schedule, size, size * q.shape[1])
    ids = np.repeat(np.arange(len(lengths)), lengths) if lengths else None
    return jaxcomm.ring_attention(
        q, k, v, "i", tokens_of(layout, "i", ids), is_causal=True, strategy=strategy,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
