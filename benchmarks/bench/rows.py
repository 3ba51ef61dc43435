"""The rows a benchmark gives: what one case measured, ready for a table or for JSON."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from bench.targets import Target
from bench.timing import Quartiles, Spread

OURS = "jaxcomm"
LAX = "jax.lax"
GLOO = "gloo"
MPI4JAX = "mpi4jax"


def is_slower(ratio: float) -> bool:
    """Return whether jaxcomm loses, by a ratio as it is printed.

    >>> is_slower(0.99), is_slower(0.996), is_slower(1.2)
    (True, False, False)
    """
    return round(ratio, 2) < 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What every row says.

    Attributes:
      suite: the subcommand that measures it.
      name: of the case, unique among those of its suite, devices and payload.
      devices: how many took part.
      detail: the shape of the problem, in words.
      target: the ratio to reach. If None, there is no target.
    """

    kind: ClassVar[str]
    suite: str
    name: str
    devices: int
    detail: str = ""
    target: Target | None = None

    @property
    def value(self) -> float | None:
        """The measure that the target bounds, None if the row has none."""
        return None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met, None without one."""
        if self.target is None or self.value is None:
            return None
        return self.target.is_met(self.value)

    def to_json(self) -> dict:
        """Return the row in types that the json module writes."""
        fields = dataclasses.asdict(self)
        if self.target is not None:
            fields["target"] |= {"met": self.is_met}
        return {"kind": self.kind, **fields}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """Variants timed against each other.

    Attributes:
      dtype: of the payload.
      payload_bytes: of each device's operand. If None, detail says what there is.
      seconds: by variant, ours first, per call.
      ratios: by variant, its time over ours.
      unit: of the work, ``"bytes"`` or ``"FLOP"``.
      work: how many of these one call does on all devices together.
      rates: by variant, work per second at the median.
      roofline: what the shares are shares of.
      roofline_rate: work per second that it reached in between.
      shares: by variant, its rate over that of the roofline.
      calls: in one sample.
      rounds: samples of each variant.
    """

    kind = "timed"
    dtype: str
    payload_bytes: int | None
    seconds: Mapping[str, Spread]
    ratios: Mapping[str, float]
    unit: str
    work: float
    rates: Mapping[str, float]
    roofline: str
    roofline_rate: float
    shares: Mapping[str, float]
    calls: int
    rounds: int

    @property
    def value(self) -> float | None:
        measures = {"ratio": self.ratios.get(LAX), "share": self.shares.get(OURS)}
        return measures.get(self.target.measure) if self.target else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesRow(TimedRow):
    """An operation between processes, each sample the time of the slowest of them.

    ``calls`` are those of ours, 0 where ours was not measured.

    Attributes:
      payload_bytes: of each process's operand.
      calls_of: in one sample, by variant.
      targets: bounds on the ratio, by variant; ``target`` is None.
      absent: by variant that was not measured, why not.
    """

    kind = "processes"
    payload_bytes: int
    calls_of: Mapping[str, int]
    targets: Mapping[str, Target]
    absent: Mapping[str, str]

    def is_met_by(self, variant: str) -> bool | None:
        """Return whether the bound on a variant's ratio is met, None without both."""
        if variant not in self.targets or variant not in self.ratios:
            return None
        return self.targets[variant].is_met(self.ratios[variant])

    def to_json(self) -> dict:
        fields = super().to_json()
        for variant, target in fields["targets"].items():
            target["met"] = self.is_met_by(variant)
        return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow(Row):
    """What compiled programs hold besides arguments and results.

    Attributes:
      temp_bytes: by variant, ``temp_size_in_bytes`` of one device's program.
      growth: by variant, against the row with the fewest devices; 0.05 is 5 %. Empty
        in that row itself.
    """

    kind = "memory"
    temp_bytes: Mapping[str, int]
    growth: Mapping[str, float]

    @property
    def value(self) -> float | None:
        return self.growth.get(OURS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedRow(Row):
    """A case that raised.

    Attributes:
      error: type and message, in one line.
    """

    kind = "failed"
    error: str


_KINDS = {row.kind: row for row in (TimedRow, ProcessesRow, MemoryRow, FailedRow)}


def from_json(fields: Mapping) -> Row:
    """Return the row of which :meth:`Row.to_json` made these fields.

    Raises:
      ValueError: the kind is unknown, or a field is missing or new.
    """
    given = dict(fields)
    kind = given.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of row; known are {', '.join(_KINDS)}")
    if "seconds" in given:
        given["seconds"] = {
            name: (Quartiles if "lower" in of else Spread)(**of)
            for name, of in given["seconds"].items()
        }
    if given.get("target"):
        given["target"] = _target(given["target"])
    if "targets" in given:
        given["targets"] = {name: _target(of) for name, of in given["targets"].items()}
    try:
        return _KINDS[kind](**given)
    except TypeError as error:
        raise ValueError(f"a row of kind {kind!r}: {error}") from None


def _target(fields):
    return Target(fields["measure"], fields["bound"])
