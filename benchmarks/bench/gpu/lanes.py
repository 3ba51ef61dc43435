"""Two independent exchanges on one lane and on two (requirement P3)."""

import warnings
from collections.abc import Iterator

import jax

import jaxcomm
from bench import units
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer, thunk


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields the time on two lanes against one lane, and against XLA's own."""
    # Neither is the default lane: both have resources of their own.
    jaxcomm.init(timer.mesh, "i", lanes=("left", "right"))
    shape = timer.size, timer.sizes.large // 4
    x, y = timer.random(shape), timer.random(shape) * 2

    def on(first, second):
        def exchange(x, y):
            with warnings.catch_warnings():
                # What it says of one lane is what is measured.
                warnings.simplefilter("ignore", RuntimeWarning)
                begun = [
                    jaxcomm.ppermute_start(each, "i", timer.ring, lane=lane)
                    for each, lane in ((x, first), (y, second))
                ]
            return [each.done() for each in begun]

        return timer.program(exchange)

    def by_xla(x, y):
        return [jax.lax.ppermute(each, "i", timer.ring) for each in (x, y)]

    ours = thunk(on("left", "right"), x, y)
    for peer, theirs in (
        ("one lane", on("left", "left")),
        ("jax.lax", timer.program(by_xla)),
    ):
        yield timer.compare(
            f"two exchanges of {units.size(timer.sizes.large)} on two lanes",
            ours, peer, thunk(theirs, x, y), calls=5,
        )  # fmt: skip
