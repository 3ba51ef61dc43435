"""Several meshes in one program.

JAX lowers a program once for all orders of devices, unless one of its primitives is
registered in ``prim_requires_devices_during_lowering``. Of such a program JAX takes one
mesh alone. But a ``jax.shard_map`` that was given its mesh has the devices in the
program: traced for other devices it is another program. There the registration is not
needed, and JAX is told so. A ``shard_map`` that takes the mesh that is set, or an
abstract one, needs it: without it a program runs with the groups of the mesh that came
first.
"""

import functools
from typing import Any

import jax

from jaxcomm.compat.needed import MODULES

_core = MODULES["jax._src.core"]
_dispatch = MODULES["jax._src.dispatch"]
# Checked on 0.10.2, 0.12.0.1. Where JAX asks otherwise, it takes one mesh a program.
_ASKED = "jaxpr_has_prim_requiring_devices"
_ours: set[Any] = set()


def require_devices_during_lowering(primitive) -> None:
    """Keep JAX from reusing a lowering of ``primitive`` on other devices.

    Without it a jitted function called under two meshes of equal shape, with the
    devices in another order, runs with the first one's groups.
    """
    _dispatch.prim_requires_devices_during_lowering.add(primitive)
    _ours.add(primitive)


def _excuse_given_meshes() -> None:
    """Have JAX ask for devices only where the program does not hold them."""
    asks = getattr(_dispatch, _ASKED, None)
    if asks is None or not hasattr(_core, "jaxprs_in_params"):
        return

    @functools.wraps(asks)
    def asks_for_devices(jaxpr):
        return asks(jaxpr) and _needs_devices(jaxpr)

    setattr(_dispatch, _ASKED, asks_for_devices)


def _needs_devices(jaxpr, is_given: bool = False, known: dict | None = None) -> bool:
    """Say whether a primitive in it needs devices that are not in the program."""
    known = {} if known is None else known
    key = jaxpr, is_given
    if key not in known:
        known[key] = any(_of(equation, is_given, known) for equation in jaxpr.eqns)
    return known[key]


def _of(equation, is_given: bool, known: dict) -> bool:
    if equation.primitive in _ours:
        return not is_given
    if equation.primitive in _dispatch.prim_requires_devices_during_lowering:
        return True
    if equation.primitive.name == "shard_map":
        is_given = isinstance(equation.params["mesh"], jax.sharding.Mesh)
    return any(
        _needs_devices(each, is_given, known)
        for each in _core.jaxprs_in_params(equation.params)
    )


_excuse_given_meshes()
