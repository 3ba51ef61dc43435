"""How a collective becomes a JAX primitive.

A collective is a subclass of :class:`Collective`. It says what it does to shapes, what
the C++ planner of its name is given, and what it computes on stacked operands.
:func:`define` makes a primitive of it, with the rules that all collectives share:
shapes, varying axes, JVP, transpose, batching and lowering. Primitives take any number
of operands, so the leaves of a pytree travel in one custom call.

Beside the collective's own parameters every primitive has ``call``, a :class:`Call`.

A collective has two primitives with the same rules. One is lowered for the devices of
a mesh. The other serves ``backend="xla"`` and knows no devices: it can be lowered for
an abstract mesh, and one lowering serves all meshes of a shape.
"""

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jaxcomm import compat
from jaxcomm.primitives import lowering
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.collective import Bound, Collective
from jaxcomm.primitives.registry import COLLECTIVES
from jaxcomm.primitives.types import typed


class CollectivePrimitive(jax.extend.core.Primitive):
    """The primitive of a collective.

    Attributes:
      portable: the twin for XLA's collectives, whose lowering asks for no devices.
    """

    multiple_results = True

    def __init__(self, name: str):
        super().__init__(name)
        # Of the same name: users see it in jaxprs and profiles.
        self.portable = jax.extend.core.Primitive(name)
        self.portable.multiple_results = True

    def bind(self, *operands, call: Call, **params):
        """Apply the primitive; its twin if the call asks for XLA's collective."""
        if call.backend == "xla":
            return self.portable.bind(*operands, call=call, **params)
        return super().bind(*operands, call=call, **params)


def define(collective: Collective) -> None:
    """Make the primitives of a collective and register their rules.

    Raises:
      ValueError: if another collective has its name.
    """
    if collective.name in COLLECTIVES:
        raise ValueError(f"there is a collective named {collective.name!r} already")
    COLLECTIVES[collective.name] = collective
    primitive = CollectivePrimitive(f"jaxcomm_{collective.name}")
    collective.primitive = primitive

    def abstract_eval(*avals, call, **params):
        return abstract_eval_of(collective, avals, call, **params)

    def jvp(primals, tangents, **params):
        if all(map(compat.is_zero_tangent, tangents)):
            outs = primitive.bind(*primals, **params)
            return outs, [compat.zero_tangent(out) for out in outs]
        # Integers have no tangents; zeros of their own type travel in their place.
        moved = [
            jnp.zeros_like(x) if jax.dtypes.float0 == t.dtype else t
            for x, t in zip(primals, map(ad.instantiate_zeros, tangents), strict=True)
        ]
        outs, out_tangents = collective.jvp(primals, moved, **params)
        return outs, [
            t if jnp.issubdtype(out.dtype, jnp.inexact) else compat.zero_tangent(out)
            for out, t in zip(outs, out_tangents, strict=True)
        ]

    def transpose(cts, *operands, **params):
        is_linear = [ad.is_undefined_primal(x) for x in operands]
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        transposed = collective.transposed(**params)
        if isinstance(transposed, Bound):
            outs = transposed(cts)
        else:
            outs = transposed(cts, operands)
        return [
            out if linear else None for out, linear in zip(outs, is_linear, strict=True)
        ]

    def batch(axis_data, operands, dims, **params):
        return collective.batch(axis_data, operands, dims, **params)

    register(primitive, abstract_eval, jvp, transpose, batch)
    lowering.register(collective)


def register(
    primitive: CollectivePrimitive, abstract_eval, jvp, transpose, batch
) -> None:
    """Register the rules of a primitive and its twin, lowering excepted."""
    for each in (primitive, primitive.portable):
        each.def_impl(_refuse_unbound)
        each.def_effectful_abstract_eval(abstract_eval)
        ad.primitive_jvps[each] = jvp
        ad.primitive_transposes[each] = transpose
        batching.fancy_primitive_batchers[each] = batch


def _refuse_unbound(*operands, call: Call, **params):
    raise NameError(
        f"unbound axis name: {call.axes}. Call jaxcomm.{call.name} inside "
        f"jax.shard_map."
    )


def abstract_eval_of(collective: Collective, avals, call: Call, **params):
    """Return the types of a collective's results, and its effects."""
    outs = collective.out_avals(avals, call.result_size, **params)
    if compat.checks_varying_axes():
        outs = typed(avals, outs, call)
    return outs, compat.named_axis_effects(call.axes)
