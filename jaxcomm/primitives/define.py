"""How a collective becomes a JAX primitive.

A collective is a subclass of :class:`Collective`: what it does to shapes, how it
is said to the C++ planner of the same name, what it computes on stacked operands,
and its transpose. :func:`define` makes a primitive of it, with the shape,
varying-axes, JVP, transpose, batching and lowering rules that all collectives
share. Primitives take any number of operands, so the leaves of a pytree travel in
one custom call.

Every primitive has these parameters beside the collective's own:

* ``axes``: the axis names, in the order that numbers the ranks;
* ``index_groups``: ``axis_index_groups`` as nested tuples, or None;
* ``invariant``: the result is typed as equal on all ranks of ``axes``;
* ``lane``, ``backend``: which communicator; None for the default;
* ``name``: what the user called, for messages.

A collective has two primitives with the same rules. One is lowered for the devices of
a mesh. The other, bound where XLA's collective is asked for, knows none: it can be
lowered for an abstract mesh, and one lowering serves all meshes of a shape.
"""

import jax
import jax.extend
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import lowering
from jaxcomm.primitives.arguments import as_arrays as as_arrays
from jaxcomm.primitives.arguments import canonical_dimension as canonical_dimension
from jaxcomm.primitives.arguments import check_lane as check_lane
from jaxcomm.primitives.arguments import check_leaves as check_leaves
from jaxcomm.primitives.arguments import count_bools as count_bools
from jaxcomm.primitives.arguments import flag as flag
from jaxcomm.primitives.arguments import group_size as group_size
from jaxcomm.primitives.arguments import has_carrier as has_carrier
from jaxcomm.primitives.arguments import index_groups_of as index_groups_of
from jaxcomm.primitives.arguments import index_pairs as index_pairs
from jaxcomm.primitives.arguments import indices as indices
from jaxcomm.primitives.arguments import integer as integer
from jaxcomm.primitives.arguments import prepare as prepare
from jaxcomm.primitives.arguments import to_carrier
from jaxcomm.primitives.batching import batch_own_axis as batch_own_axis
from jaxcomm.primitives.batching import emulate_groups as emulate_groups
from jaxcomm.primitives.collective import Collective as Collective


class CollectivePrimitive(jax.extend.core.Primitive):
    """The primitive of a collective; binding it may bind its portable twin.

    Attributes:
      portable: the twin, whose lowering asks for no devices.
    """

    multiple_results = True

    def __init__(self, name: str):
        super().__init__(name)
        # Of the same name: it is what users see in a jaxpr and in a profile.
        self.portable = jax.extend.core.Primitive(name)
        self.portable.multiple_results = True

    def bind(self, *operands, **params):
        """Applies the primitive, or the twin if the backend is surely XLA's."""
        backend = lowering.settled_backend(params["backend"])
        params["backend"] = backend
        if backend == "xla":
            return self.portable.bind(*operands, **params)
        return super().bind(*operands, **params)


def define(collective: Collective) -> CollectivePrimitive:
    """Makes the primitives of a collective and registers their rules."""
    primitive = CollectivePrimitive(f"jaxcomm_{collective.name}")
    collective.primitive = primitive

    def abstract_eval(*avals, **params):
        return abstract_eval_of(collective, avals, **params)

    def jvp(primals, tangents, **params):
        if all(map(compat.is_zero_tangent, tangents)):
            outs = primitive.bind(*primals, **params)
            return outs, [compat.zero_tangent(out) for out in outs]
        # Integers have no tangents; zeros of their own type travel in their place.
        moved = [
            jnp.zeros_like(x) if jax.dtypes.float0 == t.dtype else t
            for x, t in zip(
                primals, map(compat.ad.instantiate_zeros, tangents), strict=True
            )
        ]
        outs, out_tangents = collective.jvp(primals, moved, **params)
        return outs, [
            t if jnp.issubdtype(out.dtype, jnp.inexact) else compat.zero_tangent(out)
            for out, t in zip(outs, out_tangents, strict=True)
        ]

    def transpose(cts, *operands, **params):
        is_linear = [compat.ad.is_undefined_primal(x) for x in operands]
        cts = [compat.ad.instantiate_zeros(ct) for ct in cts]
        outs = collective.transpose_with(cts, operands, **params)
        return [
            out if linear else None for out, linear in zip(outs, is_linear, strict=True)
        ]

    def batch(axis_data, operands, dims, **params):
        return collective.batch(axis_data, operands, dims, **params)

    for each in (primitive, primitive.portable):
        each.def_impl(refuse_unbound)
        each.def_effectful_abstract_eval(abstract_eval)
        compat.ad.primitive_jvps[each] = jvp
        compat.ad.primitive_transposes[each] = transpose
        compat.batching.fancy_primitive_batchers[each] = batch
    lowering.register(collective)
    return primitive


def refuse_unbound(*operands, axes, name, **params):
    """Says that a collective was called where no axis is."""
    raise NameError(
        f"unbound axis name: {axes}. Call jaxcomm.{name} inside jax.shard_map."
    )


def bind(
    collective: Collective,
    x,
    axes,
    *,
    name: str,
    index_groups=None,
    invariant: bool = False,
    lane: str | None = None,
    backend: str | None = None,
    finish=lambda results: results,
    **params,
):
    """Applies a collective to every leaf of a pytree, in one call.

    Returns:
      ``finish(results)``.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
    """
    axes = replica_groups.canonical_axes(axes)
    operands, unpack = pack(x, axes, name, lane=lane, backend=backend)
    if not operands:
        return finish(x)
    outs = collective.primitive.bind(
        *operands,
        axes=axes,
        index_groups=index_groups,
        invariant=invariant,
        lane=lane,
        backend=backend,
        name=name,
        **params,
    )
    return finish(unpack(outs))


def pack(x, axes, name: str, *, lane: str | None, backend: str | None):
    """Makes operands of a pytree's leaves.

    Returns:
      The operands, and a function that makes a pytree like ``x`` of the results.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
      ValueError: if the lane is no name.
    """
    if lane is not None:
        check_lane(lane, f"{name} over {axes}: lane")
    leaves, tree = jax.tree.flatten(x)
    leaves = prepare(leaves, axes, name, lane=lane, backend=backend)
    dtypes = [leaf.dtype for leaf in leaves]

    def unpack(outs):
        outs = [
            out if not has_carrier(dtype) else out.astype(dtype)
            for out, dtype in zip(outs, dtypes, strict=True)
        ]
        return jax.tree.unflatten(tree, outs)

    return [to_carrier(leaf) for leaf in leaves], unpack


def abstract_eval_of(
    collective, avals, *, axes, index_groups, invariant, name, **params
):
    """Returns the types of a collective's results, and its effects."""
    compat.check_axes_bound(axes, name)
    for aval in avals:
        compat.check_not_unreduced(aval, axes, name)
    size = None
    if index_groups is None or len({len(group) for group in index_groups}) == 1:
        size = group_size(axes, index_groups)
    own = {k: v for k, v in params.items() if k not in ("lane", "backend")}
    outs = collective.out_avals(avals, size, **own)
    if compat.checks_varying_axes():
        varying = frozenset().union(*(aval.mat.varying for aval in avals))
        for i, out in enumerate(outs):
            mine = avals[i].mat.varying if len(outs) == len(avals) else varying
            outs[i] = compat.with_varying_axes(
                out, mine - frozenset(axes) if invariant else mine
            )
    return outs, compat.named_axis_effects(axes)
