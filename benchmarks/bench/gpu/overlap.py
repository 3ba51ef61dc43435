"""A send beside matrix products."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import compute_on

import jaxcomm
from bench import units
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer, thunk


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields a send in halves around the products, against other ways of doing both.

    One is to leave the whole send to XLA's own stream for collectives.
    """
    jaxcomm.init(timer.mesh, "i", lanes=("default", "side"))
    matrix = timer.sizes.matrix
    sent = timer.random((timer.size, timer.sizes.sent // 2), "bfloat16")
    y = timer.random((timer.size * matrix, matrix), "bfloat16")
    weights = timer.random((matrix, matrix), "bfloat16", jax.P())
    specs = jax.P("i"), jax.P("i"), jax.P()

    def compute(y, weights):
        for _ in range(4):
            y = (y @ weights) * 0.01
        return y

    def halves(x, y, weights):
        arriving = jaxcomm.ppermute_start(x, "i", timer.ring, lane="side")
        y = compute(arriving.then(y), weights)
        return arriving.done(after=y), y

    def whole(send):
        return timer.program(
            lambda x, y, weights: (send(x), compute(y, weights)), specs
        )

    def by(module):
        return lambda x: module.ppermute(x, "i", timer.ring)

    ours = timer.program(halves, specs)
    others = {"in turn": by(jaxcomm), "jax.lax": by(jax.lax)}
    if (on_stream := _on_collective_stream(timer)) is not None:
        others["on XLA's collective stream"] = on_stream(by(jaxcomm))
    for peer, send in others.items():
        theirs = whole(send)
        yield timer.compare(
            f"send of {units.size(timer.sizes.sent)} beside 4 products",
            thunk(ours, sent, y, weights), peer, thunk(theirs, sent, y, weights),
            calls=5,
        )  # fmt: skip


def _on_collective_stream(timer):
    """Returns what puts a function there, None where JAX (before 0.11.1) has not."""
    if timer.mesh.devices.flat[0].platform == "cpu":
        return None
    newer: Any = compute_on.compute_on  # than the JAX that pyright knows
    put = functools.partial(
        newer,
        compute_type="gpu_stream:collective",
        out_memory_spaces=jax.memory.Space.Device,
    )
    try:
        put(lambda x: x)
    except (TypeError, ValueError):
        return None
    return put
