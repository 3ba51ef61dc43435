"""Calls of the host from a program that is being lowered."""

from typing import Any

import numpy as np

from jaxcomm import compat
from jaxcomm.compat.needed import MODULES

_core = MODULES["jax._src.core"]
_mlir = MODULES["jax.interpreters.mlir"]


def calls_host(ctx) -> bool:
    """Say whether :func:`call_host` serves a program that is being lowered."""
    return compat.lowering_platform(ctx) in ("cpu", "cuda", "rocm")


def array_type(shape: tuple[int, ...], dtype) -> Any:
    """Return the type of an array, as lowering takes it."""
    return _core.ShapedArray(shape, np.dtype(dtype))


def call_host(ctx, function, operand) -> None:
    """Have each device call ``function(array)`` on the host whenever it comes here.

    As ``jax.debug.callback`` does, but the array is handed over as it comes, and not
    put on a device of the CPU first. Threads of XLA would have to be free for that.

    Args:
      ctx: of the lowering, of a program for devices of one platform.
      function: must not call JAX.
      operand: lowered, of one dimension, uint32.
    """
    # Checked on 0.10.2, 0.12.0.1.
    aval = array_type(tuple(operand.type.shape), np.uint32)

    def call(array):
        function(array)
        return ()

    _mlir.emit_python_callback(
        ctx.replace(avals_in=[aval], avals_out=[]),
        call,
        None,
        [operand],
        [aval],
        [],
        has_side_effect=True,
        returns_token=False,
    )


def kept_with_module(ctx, kind):
    """Return the object of a type that belongs to the module that is being lowered."""
    # Checked on 0.10.2, 0.12.0.1.
    kept = ctx.module_context.keepalives
    found = next((each for each in kept if type(each) is kind), None)
    if found is None:
        kept.append(found := kind())
    return found
