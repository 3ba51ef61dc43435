"""Recurrent layers in bfloat16 over split tokens, and blocks that mix them."""

import functools
import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jaxcomm
from bench.gpu import sizes
from bench.gpu.attention import SPLIT
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, thunk
from bench.tokens import tokens_of
from jaxcomm.attention.state import GatedDelta, KimiDelta, Mamba2

# Of one GPU's time, divided by the ranks: up to so many tokens, and beyond.
_SHORT, _LEAST_OF_SHORT, _LEAST_OF_LONG = 32768, 0.8, 0.9
_LAYERS = 3
# In a round: each takes long enough that the host does not matter.
_CALLS = 3


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields figures, the most telling first: a run may be cut short.

    Each kernel for one length: programs compile for long. The first kernel for all.
    """
    jaxcomm.init(timer.mesh, "i")
    first, *others = GatedDelta(), KimiDelta(), Mamba2()
    *shorter, longest = sorted(timer.sizes.tokens)
    short = min(timer.sizes.tokens)
    yield from _shares(timer, longest, first)
    for kernel in others:
        yield from _shares(timer, short, kernel)
    yield from _of_block(timer, short)
    for tokens in shorter:
        yield from _shares(timer, tokens, first)
    yield from _against_heads(timer, short, first)
    if importlib.util.find_spec("jla"):
        yield from _against_another_library(timer, short, first)


def _shares(timer, tokens, kernel):
    """Compares a layer with the same kernel on one GPU."""
    layer = _arrays(timer, tokens, kernel, timer.random)
    least = _LEAST_OF_SHORT if tokens <= _SHORT else _LEAST_OF_LONG
    parts = 1 if timer.shares_gpu else timer.size
    part = "" if parts == 1 else f", divided by {parts}"
    shorter = min(tokens, sizes.MOST_ALONE)
    if shorter < tokens:
        part = f", {sizes.length(shorter)} times {tokens // shorter}{part}"
    if jax.process_index() == 0:
        alone = _arrays(timer, shorter, kernel, lambda *a: timer.random_alone(*a[:2]))
    else:
        alone = ()
    for what, transform in _PASSES:
        yield timer.compare(
            f"{kernel.name} {sizes.length(tokens)} in zigzag, {what}",
            thunk(transform(_split(timer, scan, kernel)), *layer),
            f"the same kernel on one GPU{part}",
            thunk(transform(_on_one(kernel)), *alone),
            calls=_CALLS, alone=True, share=tokens / shorter / parts, least=least,
        )  # fmt: skip


def _against_heads(timer, tokens, kernel):
    """Compares a layer with one that splits heads in place of tokens."""
    layer = _arrays(timer, tokens, kernel, timer.random)
    for what, transform in _PASSES:
        yield timer.compare(
            f"{kernel.name} {sizes.length(tokens)} in zigzag, {what}",
            thunk(transform(_split(timer, scan, kernel)), *layer),
            "all-to-all of heads (Ulysses), then the same kernel",
            thunk(transform(_split(timer, _by_heads, kernel)), *layer), calls=_CALLS,
        )  # fmt: skip


def _against_another_library(timer, tokens, kernel):
    """Compares a layer with jax-linear-attention's, of contiguous slices.

    It wants Python 3.12 and one version of JAX, so no extra of ours installs it.
    """
    from jla.distributed import context_parallel  # pyright: ignore[reportMissingImports]

    def theirs(query, key, value, gate, beta):
        return context_parallel.context_parallel_linear_attention(
            "gated_deltanet", query, key, value, g=gate, beta=beta, mesh=timer.mesh,
            axis="i",
        )[0]  # fmt: skip

    layer = _arrays(timer, tokens, kernel, timer.random)
    for what, transform in _PASSES:
        yield timer.compare(
            f"{kernel.name} {sizes.length(tokens)} in zigzag, {what}",
            thunk(transform(_split(timer, scan, kernel)), *layer),
            "jax-linear-attention, contiguous slices",
            thunk(transform(jax.jit(theirs)), *layer), calls=_CALLS,
        )  # fmt: skip


def _of_block(timer, tokens):
    """Compares layers and attention in zigzag with the same in contiguous slices."""
    kernel = GatedDelta()
    layer = _arrays(timer, tokens, kernel, timer.random)
    for what, transform in _PASSES:
        ours, theirs = (
            thunk(transform(_split(timer, _block, kernel, schedule=by)), *layer)
            for by in ("zigzag", "contiguous")
        )
        yield timer.compare(
            f"{_LAYERS} layers of {kernel.name} and causal attention "
            f"{sizes.length(tokens)} in zigzag, {what}",
            ours, "the same in contiguous slices", theirs, calls=_CALLS,
        )  # fmt: skip


def _split(timer, function, kernel, **options):
    """Returns a program of the layer over the ranks."""
    return timer.program(functools.partial(function, kernel=kernel, **options), SPLIT)


def scan(query, key, value, gate, *beta, kernel, schedule="zigzag"):
    """Runs a layer over the axis "i"."""
    size = jax.lax.axis_size("i")
    layout = jaxcomm.Layout(schedule, size, size * query.shape[1])
    return jaxcomm.attention.state_scan(
        query, key, value, gate, "i", tokens_of(layout, "i"),
        kernel=kernel, beta=beta[0] if beta else None,
    )  # fmt: skip


def _arrays(timer, tokens, kernel, random):
    """Returns query, key, value, gate and beta of a whole sequence."""
    heads, size = timer.sizes.states
    shape = 1, tokens, heads
    query, key, value = (random((*shape, size), "bfloat16", SPLIT) for _ in range(3))
    of_gate = (*shape, size) if kernel.gates == "key" else shape
    gate, beta = random(of_gate, "float32", SPLIT), random(shape, "float32", SPLIT)

    @jax.jit
    def sensible(key, gate, beta):
        return key * size**-0.5, -0.1 * jnp.abs(gate), jax.nn.sigmoid(beta)

    key, gate, beta = sensible(key, gate, beta)
    return query, key, value, gate, *[beta][: kernel.has_beta]


def _on_one(kernel):
    """Returns the layer over a whole sequence on one device."""
    one = jax.make_mesh(
        (1,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:1]
    )
    whole = functools.partial(scan, kernel=kernel, schedule="contiguous")
    return jax.jit(
        jax.shard_map(whole, mesh=one, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    )


def _by_heads(*arrays, kernel):
    """Runs a layer over all tokens of a rank's part of the heads."""
    arrays = jaxcomm.all_to_all(arrays, "i", 2, 1, tiled=True)

    def whole(query, key, value, gate, *beta):
        return jaxcomm.attention.state_scan(
            query, key, value, gate, "alone",
            jaxcomm.Layout("contiguous", 1, query.shape[1]),
            kernel=kernel, beta=beta[0] if beta else None,
        )  # fmt: skip

    # Over an axis of one: nothing travels.
    alone = jax.tree.map(lambda x: x[None], arrays)
    out = jax.vmap(whole, axis_name="alone")(*alone)[0]
    return jaxcomm.all_to_all(out, "i", 1, 2, tiled=True)


def _block(query, key, value, gate, beta, *, kernel, schedule):
    """Runs layers, and attention of their output, over the axis "i"."""

    def layer(query, _):
        found = scan(query, key, value, gate, beta, kernel=kernel, schedule=schedule)
        return found, None

    query, _ = jax.lax.scan(layer, query, length=_LAYERS)
    heads, key_heads = query.shape[2] // 2, max(1, query.shape[2] // 8)
    size = jax.lax.axis_size("i")
    layout = jaxcomm.Layout(schedule, size, size * query.shape[1])
    return jaxcomm.ring_attention(
        query[:, :, :heads], key[:, :, :key_heads], value[:, :, :key_heads],
        "i", tokens_of(layout, "i"), is_causal=True,
    )  # fmt: skip


def _with_gradients(function):
    """Returns the sum of what a function returns, with all its gradients."""

    def loss(arrays):
        return function(*arrays).astype("float32").sum()

    found = jax.jit(jax.value_and_grad(loss))
    return lambda *arrays: found(arrays)


_PASSES = (
    ("forward", lambda f: f),
    ("forward and backward", _with_gradients),
)
