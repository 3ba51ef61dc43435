"""What a collective says about itself, and how it becomes a JAX primitive.

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

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad

from jaxcomm import compat
from jaxcomm.primitives import batching, lax, lowering
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.gathered import emulate_groups, own_rows
from jaxcomm.primitives.registry import PRIMITIVES

# By their planners' names.
COLLECTIVES: "dict[str, Collective]" = {}


class Collective:
    """What is particular to one collective. Subclasses override what differs.

    Attributes:
      name: of the C++ planner, ``ffi/planners/<name>.cc``.
      planner: the name again, or that of another collective's planner that does the
        same with ``planner_params``.
      replicated: every rank of a group gets the same result.
      dimension_params: parameters that hold one dimension for each operand, counted
        without batch dimensions.
      primitive: what :func:`define` makes.
      pair: two primitives, if the collective can be split: see ``split_phase.py``.
    """

    name: str
    planner: str
    replicated = False
    dimension_params: tuple[str, ...] = ()
    primitive: jax.extend.core.Primitive
    pair: Any

    def __init_subclass__(cls, **options):
        """Use the planner of the collective's own name by default."""
        super().__init_subclass__(**options)
        if "name" in vars(cls) and "planner" not in vars(cls):
            cls.planner = cls.name

    def shape(
        self, shape: tuple[int, ...], size: int | None, i: int, **params
    ) -> Sequence[int]:
        """Return the shape of result ``i`` from that of operand ``i``."""
        return shape

    def out_avals(self, avals: Sequence, size: int | None, **params) -> list:
        """Return the results' avals; the caller sets varying axes.

        The size is None where groups differ in size.
        """
        return [
            aval.update(shape=tuple(self.shape(aval.shape, size, i, **params)))
            for i, aval in enumerate(avals)
        ]

    def aliases(self, num_operands: int) -> dict[int, int]:
        """Return operand to result, for results that are an operand's own buffer."""
        return {}

    def sent(self, operands: Sequence) -> Sequence:
        """Return those of the operands that travel: by default all."""
        return operands

    def planner_params(self, avals: Sequence, size: int, **params) -> list[int]:
        """Return the integers that the C++ planner takes."""
        return []

    def emulate(self, x: jax.Array, i: int, **params) -> jax.Array:
        """Compute leaf ``i`` of all ranks at once.

        Args:
          x: the operands of the ranks, stacked along axis 0 in rank order.
          i: which leaf.
          **params: the collective's own parameters.

        Returns:
          The results of the ranks, stacked likewise.
        """
        raise NotImplementedError

    def emulate_all(self, xs: Sequence, size: int, **params) -> list:
        """Compute all leaves of all ranks at once; see :meth:`emulate`."""
        return [self.emulate(x, i, **params) for i, x in enumerate(xs)]

    def emulate_here(self, stacked: Sequence, call: Call, **params) -> list:
        """Compute this rank's results from the operands of all ranks, stacked."""
        outs = emulate_groups(
            self, stacked, call.axes_size, call.index_groups, **params
        )
        return own_rows(outs, call.axes)

    def fold(self, stacked: Sequence, **params) -> list | None:
        """Reduce the operands of ranks in one place to one operand, or return None.

        It may be of a wider type. What comes of it is converted back.
        """
        return None

    def xla(self, xs: Sequence, call: Call, **params) -> list:
        """Compute the same with the collectives of jax.lax."""
        stacked = [lax.all_gather(x, call.axes) for x in xs]
        return self.emulate_here(stacked, call, **params)

    def transposed(self, call: Call, **params) -> "Transposed":
        """Return the transpose. Those of this package are in one table.

        See ``collectives/transposes.py``.
        """
        raise NotImplementedError(f"{call.name} has no transpose")

    def batch(self, axis_data, operands, dims, *, call: Call, **params):
        """Apply the collective under ``jax.vmap``; operands' dims None or int."""
        return batching.batch(self, axis_data, operands, dims, call=call, **params)

    def jvp(self, primals, tangents, **params):
        """Return results and their tangents; by default the collective is linear."""
        outs = self.primitive.bind(*primals, **params)
        return outs, self.primitive.bind(*tangents, **params)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A collective with all its parameters."""

    collective: Collective
    params: dict[str, Any]

    def __call__(self, xs: Sequence) -> list:
        """Apply it to operands."""
        return self.collective.primitive.bind(*xs, **self.params)


# A collective whose transpose is a collective gives that. Others give a function from
# cotangents and operands (undefined where linear) to the operands' cotangents.
Transposed = Bound | Callable[[Sequence, Sequence], Sequence]


def bound(name: str, call: Call, **params) -> Bound:
    """Return the collective of a name with parameters."""
    return Bound(COLLECTIVES[name], {"call": call, **params})


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
        if call.is_portable:
            return self.portable.bind(*operands, call=call, **params)
        return super().bind(*operands, call=call, **params)


def define(collective: Collective) -> None:
    """Make the primitives of a collective and register their rules."""
    if collective.name in COLLECTIVES:
        raise ValueError(f"there is a collective named {collective.name!r} already")
    COLLECTIVES[collective.name] = collective
    primitive = CollectivePrimitive(f"jaxcomm_{collective.name}")
    collective.primitive = PRIMITIVES[collective.name] = primitive

    is_zero, is_undefined = compat.is_zero_tangent, ad.is_undefined_primal

    def abstract_eval(*avals, call, **params):
        return abstract_eval_of(collective, avals, call, **params)

    def jvp(primals, tangents, **params):
        if all(map(is_zero, tangents)):
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
        is_linear = [is_undefined(x) for x in operands]
        cts = [
            ad.instantiate_zeros(ct) for ct in with_integers(cts, operands, **params)
        ]
        transposed = collective.transposed(**params)
        if isinstance(transposed, Bound):
            outs = transposed(cts)
        else:
            outs = transposed(cts, operands)
        return [
            out if linear else None for out, linear in zip(outs, is_linear, strict=True)
        ]

    def with_integers(cts, operands, call, **params):
        """Give integers, which have no cotangents, zeros of their own type: see jvp."""
        if jax.dtypes.float0 not in [ct.aval.dtype for ct in cts if is_zero(ct)]:
            return cts
        types = [x.aval if is_undefined(x) else jax.typeof(x) for x in operands]
        outs = collective.out_avals(types, call.result_size, **params)
        return [
            ad.Zero(ct.aval.update(dtype=out.dtype)) if is_zero(ct) else ct
            for out, ct in zip(outs, cts, strict=True)
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
        compat.register_types(each, abstract_eval)
        ad.primitive_jvps[each] = jvp
        ad.primitive_transposes[each] = transpose
        compat.register_batching(each, batch)


def _refuse_unbound(*operands, call: Call, **params):
    raise NameError(
        f"unbound axis name: {call.axes}. Call jaxcomm.{call.name} inside "
        f"jax.shard_map."
    )


def abstract_eval_of(collective: Collective, avals, call: Call, **params):
    """Return the types of a collective's results, and its effects."""
    outs = collective.out_avals(avals, call.result_size, **params)
    if compat.checks_varying_axes():
        outs = call.typed(avals, outs)
    return outs, compat.named_axis_effects(call.axes)
