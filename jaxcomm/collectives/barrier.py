"""Barrier, and steps that ranks compare."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxcomm.primitives import lax, request
from jaxcomm.primitives.call import AxisName, Call, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.gathered import filled
from jaxcomm.primitives.request import Request, public


@public
def pbarrier(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    step: ArrayLike | None = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Return ``x`` once every device of a mesh axis has got here.

    Computations on the result run after every device has computed ``x``. Nothing is
    copied where XLA can hand the buffers on. XLA has no barrier: ``backend="xla"``
    reads ``x`` twice, and copies it.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names.
      step: integer scalar, the number of the training step. It may be traced: pass it
        to the program as an argument. If the devices are not in the same step, the
        ``host`` backend raises on all of them. Elsewhere ``x`` becomes NaN, or what JAX
        fills other dtypes with. If None, nothing is compared.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      ``x``. Its gradient passes through a barrier as well.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if step is not an integer.
      ValueError: if step is not a scalar.
      jax.errors.JaxRuntimeError: when it runs, if steps differ.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pbarrier(x, "i"),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([0, 1, 2, 3], dtype=int32)
    """
    call = call_of(name, axis_name, None, lane, backend)
    x = request.as_arrays(x, call)
    if step is None:
        return Request(BARRIER, x, call)
    step = _number(step, call)
    checked = Request(CHECK_STEP, step, call).run()

    def where_steps_are_equal(leaf):
        return jnp.where(checked == step, leaf, filled(leaf))

    leaves, tree = jax.tree.flatten(x)

    def finish(outs):
        return jax.tree.unflatten(tree, map(where_steps_are_equal, outs))

    return Request(BARRIER, leaves, call, finish=finish)


def _number(step: ArrayLike, call: Call) -> jax.Array:
    """Return the number of a step as an int32 scalar."""
    if not jnp.issubdtype(jnp.result_type(step), jnp.integer):
        raise TypeError(
            f"{call.where}: step must be an integer, got {jnp.result_type(step)}"
        )
    if jnp.shape(step) != ():
        raise ValueError(
            f"{call.where}: step must be a scalar, got shape {jnp.shape(step)}"
        )
    return jnp.asarray(step).astype(jnp.int32)


class Barrier(Collective):
    """Each result is the operand's own buffer."""

    name = "barrier"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, call):
        # XLA drops a collective whose result is not used, also by optimization_barrier.
        # So all of every x goes into this one, and its result into every element.
        xs = jax.lax.optimization_barrier(tuple(xs))
        here = sum(
            (jnp.any(x.astype(bool)).astype(jnp.int32) for x in xs), jnp.int32(0)
        )
        is_never = lax.pmax(here, call.axes) < 0
        return [jnp.where(is_never, jnp.zeros_like(x), x) for x in xs]


BARRIER = Barrier()
define(BARRIER)


class CheckStep(Collective):
    """The operand, if it is the same on all ranks; else another number."""

    name = "check_step"

    def aliases(self, num_operands):
        return {0: 0}

    def emulate(self, x, i):
        return jnp.where((x == x[:1]).all(0), x, ~x)


CHECK_STEP = CheckStep()
define(CHECK_STEP)
