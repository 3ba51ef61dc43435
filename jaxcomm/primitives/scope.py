"""A scope that chooses backend and lane for the calls traced inside it.

JAX keeps the scope in the keys of its tracing and compilation caches: a jitted function
that is called inside and outside of a scope is two programs.
"""

import contextlib
from collections.abc import Iterator

from jaxcomm.communicator.backends import NAMES
from jaxcomm.communicator.lane import check_lane
from jaxcomm.primitives.call import SCOPE, Scope


@contextlib.contextmanager
def using(*, backend: str | None = None, lane: str | None = None) -> Iterator[None]:
    """Choose the backend and the lane of all calls traced inside the ``with`` block.

    A call's own ``backend=`` or ``lane=`` comes first, then the innermost block, then
    :func:`jaxcomm.init`. Gradients use what their calls used.

    Args:
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. None leaves it as it is outside.
      lane: a lane. None leaves it as it is outside.

    Raises:
      ValueError: if there is no such backend, or the lane is no name.

    Example:
      Compare a whole program with XLA's collectives:

      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.psum(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> with jaxcomm.using(backend="xla"):
      ...     jax.jit(f)(jnp.arange(4.0))
      Array([6.], dtype=float32)
    """
    if backend is not None and backend not in NAMES:
        raise ValueError(
            f"using: backend {backend!r} is unknown; choose one of {NAMES}, or None"
        )
    if lane is not None:
        check_lane(lane, "using: lane")
    outer = SCOPE.value
    scope = Scope(
        outer.backend if backend is None else backend,
        outer.lane if lane is None else lane,
    )
    with SCOPE(scope):
        yield
