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

from collections.abc import Callable
from typing import Any, ParamSpec

from jaxcomm.collectives.all_gather import ALL_GATHER, all_gather
from jaxcomm.collectives.all_reduce import ALL_REDUCE, psum
from jaxcomm.collectives.all_to_all import ALL_TO_ALL, all_to_all
from jaxcomm.collectives.permute import PERMUTE, ppermute, ring_shift
from jaxcomm.collectives.reduce_scatter import REDUCE_SCATTER, psum_scatter
from jaxcomm.primitives import request
from jaxcomm.primitives.split_phase import Handle, define_pair

P = ParamSpec("P")

_DOC = """Begin :func:`jaxcomm.{name}`, of the same arguments and errors.

Returns:
  A handle whose ``done`` returns the result, in the same traced function.

Example:
  >>> def overlapped(x):
  ...     handle = jaxcomm.{name}_start({example})
  ...     out = jnp.sin(handle.then(x))
  ...     return handle.done(after=out) + out.sum()
  >>> f = jax.shard_map(overlapped, in_specs=jax.P("i"), out_specs=jax.P("i"))
  >>> jax.jit(f)(jnp.zeros({given})).shape
  ({got},)
"""


def _start_of(
    whole: Callable[P, Any], example: str, given: int = 4, got: int = 4
) -> Callable[P, Handle]:
    """Make the start of a collective.

    Args:
      whole: the function that does all of it.
      example: arguments for the docstring.
      given: the length of its operand, over four devices.
      got: the length of its result.
    """
    name = getattr(whole, "__name__")  # noqa: B009 -- a type of calls has no names
    doc = _DOC.format(name=name, example=example, given=given, got=got)
    start = request.start_of(whole, doc)
    start.__module__ = __name__
    return start


ppermute_start = _start_of(ppermute, 'x, "i", [(0, 1), (1, 0)]')
ring_shift_start = _start_of(ring_shift, 'x, "i"')
psum_start = _start_of(psum, 'x, "i"')
all_gather_start = _start_of(all_gather, 'x, "i", tiled=True', got=16)
psum_scatter_start = _start_of(psum_scatter, 'x, "i", tiled=True', given=16)
all_to_all_start = _start_of(all_to_all, 'x, "i", 0, 0, tiled=True', given=16, got=16)

for _collective in (PERMUTE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
    define_pair(_collective)
