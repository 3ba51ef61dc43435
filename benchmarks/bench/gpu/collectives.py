"""Ours against XLA's own: latency, bandwidth, and small sums."""

from collections.abc import Callable, Iterator

import jax

import jaxcomm
from bench import units
from bench.gpu import sums
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer, thunk


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields a figure for each collective and size, then the chains."""
    ops: dict[str, Callable] = {
        "psum": lambda m: lambda x: m.psum(x, "i"),
        "pmean": lambda m: lambda x: m.pmean(x, "i"),
        "ppermute": lambda m: lambda x: m.ppermute(x, "i", timer.ring),
        "all_gather": lambda m: lambda x: m.all_gather(x, "i"),
        "psum_scatter": lambda m: (
            lambda x: m.psum_scatter(x, "i", scatter_dimension=1, tiled=True)
        ),
        "all_to_all": lambda m: lambda x: m.all_to_all(x, "i", 1, 0, tiled=True),
    }
    jaxcomm.init(timer.mesh, "i")
    for size in timer.sizes.operands:
        # What the ranks can split.
        count = -(-size // (4 * timer.size)) * timer.size
        x = timer.random((timer.size, count))
        for name, of in ops.items():
            ours, theirs = timer.program(of(jaxcomm)), timer.program(of(jax.lax))
            yield timer.compare(
                f"{name} {units.size(size)}", thunk(ours, x), "jax.lax",
                thunk(theirs, x), least=1.0,
            )  # fmt: skip
        del x

    policies = {
        "nccl": jaxcomm.CommPolicy(lanes=3, one_shot=False),
        "captured": jaxcomm.CommPolicy(lanes=3, command_buffers=True),
    }
    for lane, policy in policies.items():
        jaxcomm.init(timer.mesh, "i", lanes=lane, policy=policy)
    # Kernels of ours make the first in one step, the next in two.
    for size in timer.sizes.chained:
        x = timer.random((timer.size, size // 4))
        theirs = thunk(sums.chain(timer, jax.lax), x)
        of = "" if size == timer.sizes.chained[0] else f" of {units.size(size)}"
        for text, lane, least in (
            ("", None, 1.0),
            (", by NCCL", "nccl", None),
            (", command buffers", "captured", None if of else 1.2),
        ):
            ours = thunk(sums.chain(timer, jaxcomm, lane=lane), x)
            yield timer.compare(
                f"chain of {sums.LENGTH}{of}{text}", ours, "jax.lax", theirs,
                calls=10, least=least,
            )  # fmt: skip
