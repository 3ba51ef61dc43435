"""A send beside matrix products."""

from collections.abc import Iterator

import jax

import jaxcomm
from jaxcomm.bench import units
from jaxcomm.bench.gpu.rows import Figure
from jaxcomm.bench.gpu.timer import Timer, thunk


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields a send in halves around the products, against doing both in turn."""
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
        return jaxcomm.ppermute_done(arriving, after=y), y

    def whole(module):
        return timer.program(
            lambda x, y, weights: (
                module.ppermute(x, "i", timer.ring),
                compute(y, weights),
            ),
            specs,
        )

    ours = timer.program(halves, specs)
    for peer, theirs in (("in turn", whole(jaxcomm)), ("jax.lax", whole(jax.lax))):
        yield timer.compare(
            f"send of {units.size(timer.sizes.sent)} beside 4 products",
            thunk(ours, sent, y, weights), peer, thunk(theirs, sent, y, weights),
            calls=5,
        )  # fmt: skip
