""":func:`jaxcomm.raise_if_failed`: whether results came from operations that failed."""

from typing import TypeVar

import jax

from jaxcomm import compat
from jaxcomm._built import ABSENCE, _ffi
from jaxcomm.errors import CommunicatorError

_Tree = TypeVar("_Tree")


def raise_if_failed(tree: _Tree) -> _Tree:
    """Wait for results, and raise if an operation failed that they may come from.

    With ``CommPolicy(on_failure="poison")`` a failed operation leaves NaN or -1 in its
    results and raises nothing, until the next call. This raises at once. It reads no
    numbers: it also raises if the results are right, but a communicator of NCCL in this
    process has failed since the last :func:`finalize` or :func:`shrink`.

    Args:
      tree: a pytree of arrays.

    Returns:
      The same, once it is computed.

    Raises:
      TypeError: it is called inside of ``jax.jit``, where nothing is computed yet.
      CommunicatorError: a communicator of NCCL failed.
      jax.errors.JaxRuntimeError: what computed the results raised.

    Example:
      >>> jaxcomm.raise_if_failed({"loss": jnp.ones(())})
      {'loss': Array(1., dtype=float32)}
    """
    if any(map(compat.is_tracer, jax.tree.leaves(tree))):
        raise TypeError(
            "raise_if_failed: a result is being traced, and is computed later. Call it "
            "on what the compiled function returns"
        )
    tree = jax.block_until_ready(tree)
    if not ABSENCE and (text := _ffi.first_failure()):
        raise CommunicatorError(f"{text}. Results may come from what failed")
    return tree
