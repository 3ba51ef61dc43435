"""The collectives that exist, by their planners' names.

A rule that needs another collective names it, and imports nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxcomm.primitives.call import Call

if TYPE_CHECKING:
    from jaxcomm.primitives.collective import Collective

COLLECTIVES: "dict[str, Collective]" = {}


def bind(name: str, xs: Sequence, call: Call, **params) -> list:
    """Apply the collective of a name to arrays of this rank."""
    return COLLECTIVES[name].primitive.bind(*xs, call=call, **params)
