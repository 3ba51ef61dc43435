"""Attention with documents and with a window, against the same kernels on one GPU."""

import functools
from collections.abc import Iterator

import jax
import numpy as np

import jaxcomm
from bench.gpu import sizes
from bench.gpu.attention import SPLIT, forward_and_backward, random_block
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk
from bench.tokens import tokens_of

_DOCUMENTS = 16
# Of 4,096 tokens in 128k.
_WINDOW_SHARE = 32


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields figures for each length: packed documents, then a window."""
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.tokens:
        window = max(tokens // _WINDOW_SHARE, 1)
        for name, strategies, options in (
            (f"{_DOCUMENTS} documents", ("ring", "all_gather"), {"documents": True}),
            (f"a window of {window}", ("ring", "halo"), {"window": window}),
        ):
            for strategy in strategies:
                yield from _of_case(timer, tokens, name, strategy, options)


def _of_case(timer, tokens, name, strategy, options):
    block = random_block(timer, tokens)
    is_first = jax.process_index() == 0
    alone = [timer.random_alone(x.shape, "bfloat16") for x in block if is_first]
    one = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("i",))
    # cuDNN has some of these masks on one GPU.
    kernel = "xla" if timer.mesh.devices.flat[0].platform == "cpu" else "pallas"
    options = options | {"implementation": kernel}
    ours, theirs = (
        functools.partial(attend, strategy=s, **options) for s in (strategy, "ring")
    )
    parts = 1 if timer.shares_gpu else timer.size
    part = "" if parts == 1 else f", divided by {parts}"
    for what, transform in (
        ("forward", jax.jit),
        ("forward and backward", forward_and_backward),
    ):
        whole = jax.shard_map(
            theirs, mesh=one, in_specs=SPLIT, out_specs=SPLIT, check_vma=False
        )
        yield timer.compare(
            f"{strategy} with {name} in {sizes.length(tokens)}, {what}",
            thunk(transform(timer.program(ours, SPLIT)), *block),
            f"the same on one GPU{part}",
            thunk(transform(whole), *alone) if is_first else None,
            calls=sizes.calls_in_a_round(tokens),
            alone=True,
            share=1 / parts,
            least=0.8,
        )


def attend(q, k, v, *, strategy, documents=False, window=None, implementation=None):
    """Attend over the axis "i", causally, to tokens in natural order.

    Args:
      q, k, v: (B, T, N, D), (B, T, K, D) and (B, T, K, D), of this rank.
      strategy, implementation: of ``ring_attention``.
      documents: whether the sequence is 16 documents of one length.
      window: how many tokens a token sees, itself among them; or None.
    """
    size = jax.lax.axis_size("i")
    layout = jaxcomm.Layout("contiguous", size, size * q.shape[1])
    ids = np.arange(layout.length) * _DOCUMENTS // layout.length if documents else None
    return jaxcomm.ring_attention(
        q, k, v, "i", tokens_of(layout, "i", ids), is_causal=True, strategy=strategy,
        implementation=implementation,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
