"""From options to what is measured, and for how long."""

from collections.abc import Iterator

from bench import (
    attention,
    chain,
    collectives,
    masks,
    memory,
    processes,
    roofline,
    scan,
)
from bench.cases import Case, Effort, Session
from bench.options import Options

_FULL = Effort(rounds=31, fewest_rounds=5, budget=10.0, sample_seconds=1e-2)
_QUICK = Effort(rounds=3, fewest_rounds=3, budget=1.0, sample_seconds=2e-4)
# Well beyond the last level of cache of current machines.
_COPY_BYTES = 128 << 20
_PRODUCT_SIZE = 2048
_QUICK_COPY_BYTES = 8 << 20
_QUICK_PRODUCT_SIZE = 512
_QUICK_SIZES = (256, 64 << 10)
_QUICK_SEQUENCE = 1024
_QUICK_TOKENS = 256


def cases(options: Options) -> Iterator[Case]:
    """Yield what to measure. Costs nothing: a case builds when its turn comes."""
    for suite in options.suites:
        yield from _OF_SUITE[suite](options, options.devices_of(suite))


def effort(options: Options) -> Effort:
    """Return how long to measure each case."""
    if options.repeats is not None:
        seconds = (_QUICK if options.quick else _FULL).sample_seconds
        return Effort(options.repeats, options.repeats, 0.0, seconds)
    return _QUICK if options.quick else _FULL


def session(options: Options, devices: int) -> Session:
    """Measure what the machine can do at most, with so many devices."""
    if options.quick:
        sizes = _QUICK_COPY_BYTES, _QUICK_PRODUCT_SIZE
    else:
        sizes = _COPY_BYTES, _PRODUCT_SIZE
    return Session(effort(options), roofline.measure(*sizes, devices))


def _collectives(options, devices):
    default = _QUICK_SIZES if options.quick else collectives.SIZES
    ops = options.ops or collectives.DEFAULT_OPS
    return collectives.cases(devices, options.sizes or default, ops)


def _sequence(options):
    default = _QUICK_SEQUENCE if options.quick else attention.SEQUENCE
    return options.sequence or default


def _memory(options, devices):
    tokens = _QUICK_TOKENS if options.quick else memory.TOKENS_PER_DEVICE
    return memory.cases(devices, tokens)


def _processes(options, counts):
    default = _QUICK_SIZES if options.quick else None
    return processes.cases(
        counts, options.sizes or default, options.ops or processes.OPS
    )


_OF_SUITE = {
    collectives.SUITE: _collectives,
    chain.SUITE: lambda options, devices: chain.cases(devices),
    scan.SUITE: lambda options, devices: scan.cases(devices),
    attention.SUITE: lambda options, devices: attention.cases(
        devices, _sequence(options)
    ),
    masks.SUITE: lambda options, devices: masks.cases(devices, _sequence(options)),
    memory.SUITE: _memory,
    processes.SUITE: _processes,
}
