"""Split-phase collectives: a start, a computation, and the handle's ``done``.

    arriving = jaxcomm.ppermute_start(block, "ring", pairs)
    out = attend(query, arriving.then(block))
    block = arriving.done(after=out)

``start`` begins the transfer and returns a :class:`jaxcomm.Handle`. Its ``done``
returns what the function without ``_start`` would have returned. Both stand in one
traced function. A handle cannot be returned, carried by a loop, passed to a transformed
function, finished twice, or finished in the body of another function than it was
started in. Each is an error when the program is traced. A handle that is never finished
is a ``RuntimeWarning``. If nobody uses the results, JAX drops both.

Until ``done``, XLA keeps the operands and the memory of the results, no longer.
``after`` are arrays that ``done`` waits for without reading them. Give it what is to be
computed during the transfer, or XLA may wait for the transfer first. XLA computes these
arrays as they stand, without fusing them; choose something that is stored anyway.

Split-phase collectives differentiate like the whole ones: the gradient of a pair is a
pair. It begins where the gradient of the results is known and ends where that of ``x``
is wanted.

Which backends overlap:

* ``host``: a transfer is under way beside the computation in every program that XLA:CPU
  runs concurrently (more than 8 operations, not all on arrays of 512 bytes or less).
* ``nccl``: a transfer is under way on a stream of the lane's own. Compute from
  ``handle.then(x)`` there, or XLA may start the transfer last. What NCCL has not, such
  as sums of narrow floats over more than two ranks, is done whole.
* ``xla`` does the whole collective in ``start`` and leaves overlap to XLA.

Devices that are alone in their group, and eager calls outside of jit, do the whole
collective in ``start``.
"""

from collections.abc import Sequence

from jaxcomm.collectives.all_gather import ALL_GATHER, To, gathering
from jaxcomm.collectives.all_reduce import ALL_REDUCE, reduction
from jaxcomm.collectives.all_to_all import ALL_TO_ALL, exchange
from jaxcomm.collectives.permute import PERMUTE, permutation, rotation
from jaxcomm.collectives.reduce_scatter import REDUCE_SCATTER, scattering
from jaxcomm.primitives.call import AxisIndexGroups, AxisName, PyTree
from jaxcomm.primitives.handle import Handle
from jaxcomm.primitives.split_phase import define_pair


def ppermute_start(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.ppermute`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.ppermute_start(x, "i", [(0, 1), (1, 0)])
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(4)).shape
      (4,)
    """
    return permutation(
        "ppermute_start",
        x,
        axis_name,
        perm,
        lane=lane,
        backend=backend,
    ).start()


def ring_shift_start(
    x: PyTree,
    axis_name: AxisName,
    shift: int = 1,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.ring_shift`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.ring_shift_start(x, "i")
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(4)).shape
      (4,)
    """
    return rotation(
        "ring_shift_start",
        x,
        axis_name,
        shift,
        lane=lane,
        backend=backend,
    ).start()


def psum_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.psum`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.psum_start(x, "i")
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(4)).shape
      (4,)
    """
    return reduction(
        "psum_start",
        "sum",
        x,
        axis_name,
        axis_index_groups=axis_index_groups,
        lane=lane,
        backend=backend,
    ).start()


def all_gather_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: To = "varying",
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.all_gather`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.all_gather_start(x, "i", tiled=True)
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(4)).shape
      (16,)
    """
    return gathering(
        "all_gather_start",
        x,
        axis_name,
        axis=axis,
        tiled=tiled,
        to=to,
        axis_index_groups=axis_index_groups,
        lane=lane,
        backend=backend,
    ).start()


def psum_scatter_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.psum_scatter`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.psum_scatter_start(x, "i", tiled=True)
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(16)).shape
      (4,)
    """
    return scattering(
        "psum_scatter_start",
        x,
        axis_name,
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        axis_index_groups=axis_index_groups,
        lane=lane,
        backend=backend,
    ).start()


def all_to_all_start(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> Handle:
    """Begin :func:`jaxcomm.all_to_all`, of the same arguments and errors.

    Returns:
      A handle whose ``done`` returns the result, in the same traced function.

    Example:
      >>> def overlapped(x):
      ...     handle = jaxcomm.all_to_all_start(x, "i", 0, 0, tiled=True)
      ...     out = jnp.sin(handle.then(x))
      ...     return handle.done(after=out) + out.sum()
      >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.zeros(16)).shape
      (16,)
    """
    return exchange(
        "all_to_all_start",
        x,
        axis_name,
        split_axis,
        concat_axis,
        tiled=tiled,
        axis_index_groups=axis_index_groups,
        lane=lane,
        backend=backend,
    ).start()


for _collective in (PERMUTE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
    define_pair(_collective)
