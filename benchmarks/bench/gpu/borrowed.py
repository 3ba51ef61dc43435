"""Collectives on the communicators that XLA lends, against XLA's own."""

from collections.abc import Iterator

import jax
import numpy as np

import jaxcomm
from bench.gpu import sums
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, local, thunk

_LANES = "lent", "lent too"


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields whether results on two lanes are XLA's, and the time of a chain."""
    policy = jaxcomm.CommPolicy(source="xla")
    try:
        jaxcomm.init(timer.mesh, "i", lanes=_LANES, policy=policy)
    except jaxcomm.CommunicatorError as error:
        yield timer.finding("communicators that XLA lends", str(error))
        return
    calls = {
        "psum": lambda m, x, **at: m.psum(x, "i", **at),
        "ppermute": lambda m, x, **at: m.ppermute(x, "i", timer.ring, **at),
        "all_gather": lambda m, x, **at: m.all_gather(x, "i", tiled=True, **at),
        "psum_scatter": lambda m, x, **at: m.psum_scatter(x, "i", tiled=True, **at),
        "all_to_all": lambda m, x, **at: m.all_to_all(x, "i", 0, 0, tiled=True, **at),
    }
    x = timer.random((timer.size * timer.size, 8))
    wrong = []
    for name, call in calls.items():
        expected = local(timer.program(lambda x, call=call: call(jax.lax, x))(x))
        for lane in _LANES:
            ours = timer.program(
                lambda x, call=call, lane=lane: call(jaxcomm, x, lane=lane)
            )
            if not np.array_equal(local(ours(x)), expected):
                wrong.append(f"{name} on lane {lane!r}")
    total = len(calls) * len(_LANES)
    yield timer.finding(
        "collectives on communicators that XLA lends",
        f"{total - len(wrong)} of {total}{''.join('; ' + each for each in wrong)}",
        not wrong,
    )

    ours = sums.chain(timer, jaxcomm, lane=_LANES[0])
    yield timer.compare(
        f"chain of {sums.LENGTH}, on a communicator of XLA's", thunk(ours, x),
        "jax.lax", thunk(sums.chain(timer, jax.lax), x), calls=10,
    )  # fmt: skip
