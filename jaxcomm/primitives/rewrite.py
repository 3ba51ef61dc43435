"""How lowering replaces a collective that a backend lacks by ones that it has."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxcomm.primitives import registry
from jaxcomm.primitives.call import Call

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
        return registry.bind(name, xs, self.call, **params)

    def over_all_groups(self) -> "Bind":
        """Return one that passes over ``axis_index_groups``."""
        return Bind(self.call.replace(index_groups=None))


Replacement = Callable[[Bind, Sequence], Sequence]
# From the collective, its operands' types on one rank, the size of a group, and its own
# parameters by name, to what replaces it; None if the backend does it as it is.
Rule = Callable[..., Replacement | None]
