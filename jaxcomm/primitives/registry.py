"""The primitives of the collectives, by their planners' names.

A rule that needs another collective names it, and imports nothing. Lowering replaces a
collective that a backend lacks by ones that it has.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.extend

from jaxcomm.communicator.policy import RowMover
from jaxcomm.primitives.call import Call

PRIMITIVES: dict[str, jax.extend.core.Primitive] = {}


def bind(name: str, xs: Sequence, call: Call, **params) -> list:
    """Apply the collective of a name to arrays of this rank."""
    return PRIMITIVES[name].bind(*xs, call=call, **params)


# The collective name of a rule for all collectives of a backend.
ANY = "*"


@dataclasses.dataclass(frozen=True)
class Bind:
    """What applies collectives, by name, in place of a call that is being lowered.

    Attributes:
      call: the axes, groups, lane and backend to use.
    """

    call: Call

    def __call__(self, name: str, xs: Sequence, **params) -> list:
        """Apply a collective to arrays of this rank."""
        return bind(name, xs, self.call, **params)

    def over_all_groups(self) -> "Bind":
        """Return one that passes over ``axis_index_groups``."""
        return Bind(self.call.replace(index_groups=None))


Replacement = Callable[[Bind, Sequence], Sequence]


@dataclasses.dataclass(frozen=True)
class Served:
    """The groups of a call, and what serves them.

    Attributes:
      backend: its name.
      platform: of the devices.
      size: the number of ranks of the largest group.
      row_mover: what sends rows as they lie: see
        :func:`~jaxcomm.communicator.policy.row_mover`.
    """

    backend: str
    platform: str | None
    size: int
    row_mover: RowMover | None = None


# From the collective, its operands' types on one rank, what serves it, and its own
# parameters by name, to what replaces it; None if the backend does it as it is.
Rule = Callable[..., Replacement | None]
