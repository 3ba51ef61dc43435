"""Ours against XLA's own: latency, bandwidth, dispatch to experts, and small sums."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

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
    for size in (timer.sizes.small, timer.sizes.large):
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
    yield _dispatch(timer)

    x = timer.random((timer.size, 64))
    theirs = sums.chain(timer, jax.lax)
    policies = {
        "nccl": jaxcomm.CommPolicy(lanes=3, one_shot=False),
        "captured": jaxcomm.CommPolicy(lanes=3, command_buffers=True),
    }
    for text, lane, least in (
        ("", None, 1.0),
        (", by NCCL", "nccl", None),
        (", command buffers", "captured", 1.2),
    ):
        if lane is not None:
            jaxcomm.init(timer.mesh, "i", lanes=lane, policy=policies[lane])
        ours = sums.chain(timer, jaxcomm, lane=lane)
        yield timer.compare(
            f"chain of {sums.LENGTH}{text}", thunk(ours, x), "jax.lax",
            thunk(theirs, x), calls=10, least=least,
        )  # fmt: skip


def _dispatch(timer):
    """Send 8,192 tokens of each rank, of 4,096 numbers, to two experts each."""
    size, experts = timer.size, 8
    width = min(4096, timer.sizes.sent // 64)
    rows = timer.sizes.sent // (2 * width)
    even = [1 / (size * experts)] * (size * experts)
    sent = np.random.default_rng(0).multinomial(rows, even, size)
    received = sent.reshape(size, size, experts).transpose(1, 0, 2).reshape(size, -1)
    places = (np.cumsum(received, 1) - received).reshape(size, size, experts)
    numbers = np.cumsum(sent, 1) - sent, sent, places.transpose(1, 0, 2), received
    x = timer.random((size * rows, width), "bfloat16")
    out = jnp.zeros_like(x, shape=(size * int(received.sum(1).max()), width))
    out = jax.device_put(out, x.sharding)
    operands = x, out, *(timer.spread(a.astype(np.int32).ravel()) for a in numbers)
    # XLA has no such operation on CPU devices.
    is_gpu = timer.mesh.devices.flat[0].platform == "gpu"
    ours = functools.partial(jaxcomm.ragged_all_to_all, axis_name="i")
    theirs = (
        functools.partial(jax.lax.ragged_all_to_all, axis_name="i")
        if is_gpu
        else functools.partial(ours, backend="xla")
    )
    spec = (jax.P("i"),) * len(operands)
    return timer.compare(
        f"ragged_all_to_all of {rows} rows",
        thunk(timer.program(ours, spec), *operands),
        "jax.lax" if is_gpu else "gathered by XLA",
        thunk(timer.program(theirs, spec), *operands),
        least=1.0,
    )
