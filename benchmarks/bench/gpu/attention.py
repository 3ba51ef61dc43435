"""Ring attention in bfloat16 against its rivals, forward and backward."""

import functools
from collections.abc import Iterator

import jax

import jaxcomm
from bench.gpu import sizes
from bench.gpu.one_kernel import best_kernel, one_kernel
from bench.gpu.rows import Figure, Finding
from bench.gpu.standstill import standstill
from bench.gpu.timer import Timer, thunk
from bench.tokens import tokens_of
from jaxcomm.attention.kernels import cudnn

SPLIT = jax.P(None, "i")
# Within 1.15 of one attention.
_LEAST_OF_ONE = 1 / 1.15
# Of fewer tokens the start of a program takes as long as the attention: see layered.
_LONG = 16384


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields figures for each length: causal, then without a mask.

    jaxcomm chooses its kernel. A causal all-gather has no fused form in JAX:
    cuDNN's causal mask begins at the first key, where the queries of a later rank do
    not, and a bias would be as large as all scores. Without a mask it has one.
    """
    kernel = "xla" if timer.mesh.devices.flat[0].platform == "cpu" else "cudnn"
    reason = cudnn.fused_attention_reason(timer.sizes.heads[2])
    if kernel == "cudnn" and reason:
        yield timer.finding("attention", f"not measured: {reason}")
        return
    jaxcomm.init(timer.mesh, "i")
    for tokens in timer.sizes.up_to(sizes.MOST_ALONE):
        yield from _of_length(timer, tokens, kernel)


def _of_length(timer, tokens, kernel):
    block = random_block(timer, tokens)
    # The first process alone times these.
    alone = [
        timer.random_alone(x.shape, "bfloat16")
        for x in block
        if jax.process_index() == 0
    ]
    calls, length = sizes.calls_in_a_round(tokens), sizes.length(tokens)

    def ring(transform, backend=None, is_causal=True):
        attend = functools.partial(
            attend_in_zigzag, backend=backend, is_causal=is_causal
        )
        return thunk(transform(timer.program(attend, SPLIT)), *block)

    def compare(name, transform, ours, peer, theirs, *, is_causal, least):
        """Compares a ring with a peer, then what it would be without its sends."""
        yield timer.compare(name, ours, peer, theirs, calls=calls, least=least)
        with standstill() as backend:
            alone = ring(transform, backend, is_causal)
            name += ", sending nothing (the limit)"
            yield timer.compare(name, alone, peer, theirs, calls=calls)

    for what, transform in (
        ("forward", lambda f: f),
        ("forward and backward", forward_and_backward),
    ):
        causal = f"causal ring attention {length}, {what}"
        ours = ring(transform)
        yield from compare(
            causal, transform, ours, "the same over jax.lax.ppermute",
            ring(transform, "xla"), is_causal=True, least=1.05,
        )  # fmt: skip
        # On one GPU the ranks take as long as it does alone; each on its own, a part.
        parts = 1 if timer.shares_gpu else timer.size
        part = "" if parts == 1 else f", divided by {parts}"
        for one in dict.fromkeys((kernel, best_kernel(timer))):
            yield timer.compare(
                causal, ours, f"one {one} kernel over the whole sequence{part}",
                thunk(transform(one_kernel(one)), *alone),
                calls=calls, alone=True, share=1 / parts, least=_LEAST_OF_ONE,
            )  # fmt: skip
            if tokens >= _LONG:
                continue
            count = timer.sizes.layers
            layers = layered(timer.program(attend_in_zigzag, SPLIT), count)
            yield timer.compare(
                f"{count} layers of {causal}", thunk(transform(layers), *block),
                f"{count} times one {one} kernel over the whole sequence{part}",
                thunk(transform(layered(one_kernel(one), count)), *alone),
                calls=calls, alone=True, share=1 / parts, least=_LEAST_OF_ONE,
            )  # fmt: skip
        yield from compare(
            f"ring attention without mask {length}, {what}", transform,
            ring(transform, is_causal=False),
            f"jax.lax.all_gather of keys and values, then one {kernel} kernel",
            thunk(transform(timer.program(gathered(kernel), SPLIT)), *block),
            is_causal=False, least=1.0,
        )  # fmt: skip


def random_block(timer: Timer, tokens: int, heads=None, key_heads=None) -> list:
    """Returns query, key and value of a whole sequence, split over the ranks."""
    usual, usual_keys, size = timer.sizes.heads
    heads, key_heads = heads or usual, key_heads or usual_keys
    shapes = [(1, tokens, n, size) for n in (heads, key_heads, key_heads)]
    return [timer.random(shape, "bfloat16", SPLIT) for shape in shapes]


def attend_in_zigzag(q, k, v, *, is_causal=True, backend=None, strategy="ring"):
    """Attends over the axis "i", to tokens dealt in zigzag."""
    size = jax.lax.axis_size("i")
    layout = jaxcomm.Layout("zigzag", size, size * q.shape[1])
    return jaxcomm.ring_attention(
        q, k, v, "i", tokens_of(layout, "i"),
        is_causal=is_causal, backend=backend, strategy=strategy,
    )  # fmt: skip


def layered(attend, count):
    """Returns several attentions in one program, each with the last one's output."""

    @jax.jit
    def run(query, key, value):
        for _ in range(count):
            query = attend(query, key, value)
        return query

    return run


def gathered(kernel):
    """Returns attention of a rank's queries to the keys and values of all."""

    def attend(q, k, v):
        k, v = jax.lax.all_gather((k, v), "i", axis=1, tiled=True)
        return jax.nn.dot_product_attention(q, k, v, implementation=kernel)

    return attend


def forward_and_backward(function):
    """Returns the sum of what a function returns, with its gradients."""

    def loss(*x):
        return function(*x).astype("float32").sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
