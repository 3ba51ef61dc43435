"""Tokens to experts: ``ragged_all_to_all`` by sizes that hosts read, or GPUs."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from bench import units
from bench.gpu.rows import Figure
from bench.gpu.timer import Timer, thunk

# Experts of a rank, and numbers of a token. Two experts get each of 8,192 tokens.
_EXPERTS, _WIDTH = 8, 4096


def rows(timer: Timer) -> Iterator[Figure]:
    """Yields figures of what a rank sends, and of an eighth, by who reads the sizes."""
    jaxcomm.init(timer.mesh, "i")
    policy = jaxcomm.CommPolicy(lanes=3, device_sizes=True)
    jaxcomm.init(timer.mesh, "i", lanes="sizes", policy=policy)
    for sent in (timer.sizes.sent, timer.sizes.sent // 8):
        for times in (1, timer.sizes.exchanges):
            for reader, lane in (("hosts", None), ("GPUs", "sizes")):
                yield _exchanges(timer, sent, times, reader, lane)


def _exchanges(timer, sent, times, reader, lane):
    width = min(_WIDTH, sent // 64)
    count = sent // (2 * width)
    operands = _operands(timer, count, width)
    # XLA has no such operation on CPU devices.
    is_gpu = timer.mesh.devices.flat[0].platform == "gpu"
    xla = functools.partial(jaxcomm.ragged_all_to_all, backend="xla")
    ours = functools.partial(jaxcomm.ragged_all_to_all, lane=lane)
    theirs = jax.lax.ragged_all_to_all if is_gpu else xla

    def chain(exchange):
        def run(x, *others):
            for _ in range(times):
                x = exchange(x, *others, axis_name="i")
            return x

        spec = (jax.P("i"),) * len(operands)
        return thunk(timer.program(run, spec), *operands)

    again = "" if times == 1 else f", {times} in a row"
    name = f"ragged_all_to_all of {count} rows, {units.size(sent)}{again}, {reader}"
    peer = "jax.lax" if is_gpu else "gathered by XLA"
    return timer.compare(name, chain(ours), peer, chain(theirs), calls=10, least=1.0)


def _operands(timer, count, width):
    """Returns rows, a result as large, and the numbers of slices as drawn."""
    size = timer.size
    even = [1 / (size * _EXPERTS)] * (size * _EXPERTS)
    sent = np.random.default_rng(0).multinomial(count, even, size)
    received = sent.reshape(size, size, _EXPERTS).transpose(1, 0, 2).reshape(size, -1)
    places = (np.cumsum(received, 1) - received).reshape(size, size, _EXPERTS)
    numbers = np.cumsum(sent, 1) - sent, sent, places.transpose(1, 0, 2), received
    most = max(int(received.sum(1).max()), count)
    x = timer.random((size * most, width), "bfloat16")
    out = jax.jit(jnp.zeros_like, out_shardings=x.sharding)(x)
    return x, out, *(timer.spread(a.astype(np.int32).ravel()) for a in numbers)
