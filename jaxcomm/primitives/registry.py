"""The primitives of the collectives, by their planners' names.

A rule that needs another collective names it, and imports nothing.
"""

from collections.abc import Sequence

import jax.extend

from jaxcomm.primitives.call import Call

PRIMITIVES: dict[str, jax.extend.core.Primitive] = {}


def bind(name: str, xs: Sequence, call: Call, **params) -> list:
    """Apply the collective of a name to arrays of this rank."""
    return PRIMITIVES[name].bind(*xs, call=call, **params)
