"""Collectives and what numpy makes of them, with roots and distances drawn.

Operands have shape (n, k) on each of n ranks. A model takes those of all ranks, shape
(n, n, k), and returns the results by rank.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import catalogue
import numpy as np

import jaxcomm


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective with a choice of root or distance made.

    Attributes:
      call: takes the operand, the axes and keyword options.
      model: takes all operands and returns all results.
    """

    call: Callable[..., Any]
    model: Callable[[np.ndarray], np.ndarray]


def operations(size: int, rng: np.random.Generator) -> dict[str, Operation]:
    """Return every collective whose results are exact, for groups of a size, by name.

    Args:
      size: ranks of a group.
      rng: chooses roots, distances and permutations.
    """
    choice = catalogue.drawn(size, rng)

    def call(case, x, axes, **options):
        return case(jaxcomm, x, axes, choice, **options)

    return {
        name: Operation(functools.partial(call, case), case.model(choice))
        for name, case in catalogue.CASES.items()
        # Products grow past what is exact, and columns may be of any number.
        if case.kind in ("move", "sum", "extreme") and not case.cuts_columns
    }
