"""A case: variants that do the same work, timed against each other and a roofline."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from bench import roofline, timing
from bench.rows import OURS, Row, TimedRow
from bench.targets import Target

_ROOFLINE = "roofline"


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
      rounds: samples of each variant.
      fewest_rounds: samples even when the budget is spent.
      budget: seconds for one case, after which no further round begins.
      sample_seconds: how long a sample lasts at least, by repeating the call.
    """

    rounds: int
    fewest_rounds: int
    budget: float
    sample_seconds: float


@dataclasses.dataclass(frozen=True)
class Session:
    """What all cases of a run share.

    Attributes:
      effort: how long to measure.
      rooflines: what this machine can do at most.
    """

    effort: Effort
    rooflines: list[roofline.Roofline]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure; one row, or several.

    Attributes:
      suite: the subcommand it belongs to.
      name: of the row.
      devices: how many take part.
      detail: the shape of the problem, in words.
      target: the ratio to reach. If None, there is no target.
    """

    suite: str
    name: str
    devices: int
    detail: str = ""
    target: Target | None = None

    def measure(self, session: Session) -> Sequence[Row]:
        """Measure it.

        Raises:
          Exception: whatever the measured code raises.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCase(Case):
    """Variants to time.

    Attributes:
      dtype: of the payload.
      payload_bytes: of each device's operand. If None, detail says what there is.
      unit: of the work, as in the module roofline.
      work: how many of these one call does on all devices together.
      build: returns the variants by name, ours first; called once, when it is the
        case's turn. A variant starts the work and returns its result.
      tolerance: by how much the results may differ, relative to their largest value.
      align: brings a variant's result, given its name, into the order of the others.
    """

    dtype: str = "float32"
    payload_bytes: int | None = None
    unit: str = roofline.BYTES
    work: float
    build: Callable[[], Mapping[str, Callable[[], object]]]
    tolerance: float = 0.0
    align: Callable[[str, object], object] = lambda name, result: result

    def measure(self, session: Session) -> Sequence[Row]:
        started = self.build()
        # A result that is wrong has no speed. This also compiles and warms up.
        results = {name: self.align(name, call()) for name, call in started.items()}
        check_agreement(results, self.tolerance)
        del results
        variants = {
            name: functools.partial(_finish, call) for name, call in started.items()
        }
        effort = session.effort
        calls = timing.calls_per_sample(variants, seconds=effort.sample_seconds)
        limit = roofline.best(session.rooflines, self.unit)
        samples = timing.interleave(
            {**variants, _ROOFLINE: limit.call},
            calls={**dict.fromkeys(variants, calls), _ROOFLINE: 1},
            rounds=effort.rounds,
            last=_ROOFLINE,
            fewest_rounds=effort.fewest_rounds,
            budget=effort.budget,
        )
        return [self._row(samples, calls, limit)]

    def _row(self, samples, calls, limit):
        at_limit = samples.pop(_ROOFLINE)
        seconds = {name: timing.Spread.of(of) for name, of in samples.items()}
        # Per unit of work, so that a round's two times can be compared.
        scale = self.work / limit.work
        return TimedRow(
            suite=self.suite,
            name=self.name,
            devices=self.devices,
            detail=self.detail,
            target=self.target,
            dtype=self.dtype,
            payload_bytes=self.payload_bytes,
            seconds=seconds,
            ratios={
                name: timing.median_ratio(of, samples[OURS])
                for name, of in samples.items()
                if name != OURS and OURS in samples
            },
            unit=self.unit,
            work=self.work,
            rates={name: self.work / of.median for name, of in seconds.items()},
            roofline=limit.name,
            roofline_rate=limit.work / timing.Spread.of(at_limit).median,
            shares={
                name: scale * timing.median_ratio(at_limit, of)
                for name, of in samples.items()
            },
            calls=calls,
            rounds=len(at_limit),
        )


def check_agreement(results: Mapping[str, object], tolerance: float) -> None:
    """Compare every variant's result to that of the first.

    Args:
      results: pytrees of arrays, by variant; equal in structure and sharding.
      tolerance: largest difference, relative to the largest value of a shard.

    Raises:
      ValueError: results differ; the text names the variants and by how much.
    """
    (first, expected), *others = results.items()
    for name, found in others:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if np.shape(a) != np.shape(b):
                raise ValueError(
                    f"the results of {name} and {first} differ in shape: {np.shape(a)} "
                    f"and {np.shape(b)}"
                )
            error = _largest_error(a, b)
            # Negated, so that NaN fails.
            if not error <= tolerance:
                raise ValueError(
                    f"the results of {name} and {first} differ by {error:.2g} of their "
                    f"largest value; at most {tolerance:g} was expected"
                )


def _largest_error(found, expected):
    worst = 0.0
    for a, b in _shards(found, expected):
        if np.array_equal(a, b):
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return np.nan
        largest = max(np.abs(b).max(initial=0), np.finfo(np.float32).tiny)
        worst = max(worst, np.abs(a - b).max(initial=0) / largest)
    return worst


def _shards(found, expected):
    """Pair the shards: copied nowhere, for a gathered array may have a gigabyte."""
    sharding = getattr(found, "sharding", None)
    if sharding is None or sharding != getattr(expected, "sharding", None):
        yield np.asarray(found), np.asarray(expected)
        return
    shards = zip(found.addressable_shards, expected.addressable_shards, strict=True)
    for a, b in shards:
        yield np.asarray(a.data), np.asarray(b.data)


def _finish(call):
    jax.block_until_ready(call())
