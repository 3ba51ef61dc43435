"""A number that says where it is from."""

import dataclasses

# How a figure came about, by the letter that tables print behind it.
ORIGINS = {
    "m": "measured by a calibration",
    "s": "a calibration, scaled by formula",
    "t": "table of what was measured elsewhere",
    "f": "formula with the machine's numbers",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and its origin.

    Attributes:
      value: in bytes, seconds or a count.
      origin: a key of ``ORIGINS``. Of a sum, the least certain of its parts'.

    Example:
      >>> Figure(2.0, "m") + Figure(3.0, "t")
      Figure(value=5.0, origin='t')
      >>> 4 * Figure(0.5, "f")
      Figure(value=2.0, origin='f')
    """

    value: float
    origin: str

    def __add__(self, other: "Figure") -> "Figure":
        # What adds nothing is not heard of.
        parts = [each for each in (self, other) if each.value] or [self]
        origin = max((each.origin for each in parts), key=_UNCERTAINTY.index)
        return Figure(self.value + other.value, origin)

    def __rmul__(self, factor: float) -> "Figure":
        return Figure(factor * self.value, self.origin)


_UNCERTAINTY = "mstf"
NOTHING = Figure(0, "f")


def total(figures) -> Figure:
    """Add figures.

    >>> total([Figure(1.0, "m"), Figure(2.0, "s")])
    Figure(value=3.0, origin='s')
    """
    return sum(figures, NOTHING)
