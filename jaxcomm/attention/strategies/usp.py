"""USP: Ulysses among neighbouring ranks, and a ring across the groups."""

import dataclasses

from jaxcomm.attention.problem import Problem
from jaxcomm.attention.strategies.ulysses import Ulysses


@dataclasses.dataclass(frozen=True)
class Usp(Ulysses):
    """Ulysses with a width below the size of the axis.

    Of two mesh axes the last is the one that exchanges heads; put it on the faster
    links.
    """

    name = "usp"

    @classmethod
    def of(cls, problem: Problem) -> "Usp":
        """Choose the width: the last of several axes, or the most that key heads allow.

        Key heads are then not repeated.
        """
        if len(problem.axis_sizes) > 1:
            return cls(problem.axis_sizes[-1])
        divisors = [
            width
            for width in range(1, problem.size)
            if problem.size % width == 0 and problem.key_heads % width == 0
        ]
        return cls(max(divisors, default=1))

    def why_not(self, problem):
        if not 1 < self.width < problem.size:
            return (
                f"a group of {self.width} of {problem.size} ranks leaves nothing to "
                "Ulysses or nothing to the ring; split the sequence over two axes, or "
                "pass Usp(width)"
            )
        return super().why_not(problem)
