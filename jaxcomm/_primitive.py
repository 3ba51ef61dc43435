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
"""

import math
from collections.abc import Sequence

import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxcomm import _jax_compat, _lowering, mesh_groups

# Types with several elements to a byte travel as the next wider type, which holds
# every value of theirs.
_CARRIERS = {
    "int1": np.int8,
    "uint1": np.uint8,
    "int2": np.int8,
    "uint2": np.uint8,
    "int4": np.int8,
    "uint4": np.uint8,
    "float4_e2m1fn": ml_dtypes.bfloat16,
}


class Collective:
    """What is particular to one collective. Subclasses override what differs.

    Attributes:
      name: of the C++ planner, ``ffi/handlers/<name>.cc``.
      replicated: every rank of a group gets the same result.
      dimension_params: parameters that hold one dimension for each operand, counted
        without batch dimensions.
    """

    name: str
    replicated = False
    dimension_params: tuple[str, ...] = ()

    def shape(
        self, shape: tuple[int, ...], size: int, i: int, **params
    ) -> Sequence[int]:
        """Returns the shape of result ``i`` from that of operand ``i``."""
        return shape

    def out_avals(self, avals: Sequence, size: int, **params) -> list:
        """Returns the results' avals; varying axes are set by the caller."""
        return [
            aval.update(shape=tuple(self.shape(aval.shape, size, i, **params)))
            for i, aval in enumerate(avals)
        ]

    def aliases(self, num_operands: int) -> dict[int, int]:
        """Returns operand to result, for results that are an operand's own buffer."""
        return {}

    def planner_params(self, avals: Sequence, size: int, **params) -> list[int]:
        """Returns the integers the C++ planner wants."""
        return []

    def emulate(self, x: jax.Array, i: int, **params) -> jax.Array:
        """Computes leaf ``i`` of all ranks at once.

        Args:
          x: the operands of the ranks, stacked along axis 0 in rank order.
          i: which leaf.
          **params: the collective's own parameters.

        Returns:
          The results of the ranks, stacked likewise.
        """
        raise NotImplementedError

    def emulate_all(self, xs: Sequence, size: int, **params) -> list:
        """Computes all leaves of all ranks at once; see :meth:`emulate`."""
        return [self.emulate(x, i, **params) for i, x in enumerate(xs)]

    def fold(self, stacked: Sequence, **params) -> list | None:
        """Returns operands that stand for several ranks', or None if none can."""
        return None

    def xla(self, xs: Sequence, axes, index_groups, **params) -> list:
        """Does the same with the collectives of jax.lax."""
        size = math.prod(jax.lax.axis_size(axis) for axis in axes)
        stacked = [jax.lax.all_gather(x, axes) for x in xs]
        outs = emulate_groups(self, stacked, size, index_groups, **params)
        rank = jax.lax.axis_index(axes)
        return [jax.lax.dynamic_index_in_dim(out, rank, 0, False) for out in outs]

    def transpose(self, cts: Sequence, **params) -> Sequence:
        """Returns the cotangents of the operands. None: not linear."""
        raise NotImplementedError

    def transpose_with(self, cts, operands, **params) -> Sequence:
        """Like :meth:`transpose`, for those not linear in every operand."""
        return self.transpose(cts, **params)

    def batch(self, axis_data, operands, dims, **params):
        """Applies the collective under ``jax.vmap``; operands' dims None or int."""
        return _batch(self, axis_data, operands, dims, **params)

    def jvp(self, primals, tangents, **params):
        """Returns results and their tangents; by default the collective is linear."""
        outs = self.primitive.bind(*primals, **params)
        return outs, self.primitive.bind(*tangents, **params)

    primitive: jax.extend.core.Primitive


def define(collective: Collective) -> jax.extend.core.Primitive:
    """Makes the primitive of a collective and registers its rules."""
    primitive = jax.extend.core.Primitive(f"jaxcomm_{collective.name}")
    primitive.multiple_results = True
    collective.primitive = primitive

    def abstract_eval(*avals, **params):
        return _abstract_eval(collective, avals, **params)

    def impl(*args, axes, name, **params):
        raise NameError(
            f"unbound axis name: {axes}. Call jaxcomm.{name} inside jax.shard_map."
        )

    def jvp(primals, tangents, **params):
        if all(type(t) is _jax_compat.ad.Zero for t in tangents):
            outs = primitive.bind(*primals, **params)
            return outs, [_jax_compat.zero_tangent(out) for out in outs]
        # Integers have no tangents; zeros of their own type travel in their place.
        moved = [
            jnp.zeros_like(x) if jax.dtypes.float0 == t.dtype else t
            for x, t in zip(
                primals, map(_jax_compat.ad.instantiate_zeros, tangents), strict=True
            )
        ]
        outs, out_tangents = collective.jvp(primals, moved, **params)
        return outs, [
            t
            if jnp.issubdtype(out.dtype, jnp.inexact)
            else _jax_compat.zero_tangent(out)
            for out, t in zip(outs, out_tangents, strict=True)
        ]

    def transpose(cts, *operands, **params):
        is_linear = [_jax_compat.ad.is_undefined_primal(x) for x in operands]
        cts = [_jax_compat.ad.instantiate_zeros(ct) for ct in cts]
        outs = collective.transpose_with(cts, operands, **params)
        return [
            out if linear else None for out, linear in zip(outs, is_linear, strict=True)
        ]

    def batch(axis_data, operands, dims, **params):
        return collective.batch(axis_data, operands, dims, **params)

    primitive.def_impl(impl)
    primitive.def_effectful_abstract_eval(abstract_eval)
    _jax_compat.ad.primitive_jvps[primitive] = jvp
    _jax_compat.ad.primitive_transposes[primitive] = transpose
    _jax_compat.batching.fancy_primitive_batchers[primitive] = batch
    _lowering.register(collective)
    return primitive


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
    **params,
):
    """Applies a collective to every leaf of a pytree, in one call.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
    """
    axes = mesh_groups.canonical_axes(axes)
    leaves, tree = jax.tree.flatten(x)
    leaves = prepare(leaves, axes, name)
    if not leaves:
        return x
    dtypes = [leaf.dtype for leaf in leaves]
    outs = collective.primitive.bind(
        *(_to_carrier(leaf) for leaf in leaves),
        axes=axes,
        index_groups=index_groups,
        invariant=invariant,
        lane=lane,
        backend=backend,
        name=name,
        **params,
    )
    outs = [
        out if not has_carrier(dtype) else out.astype(dtype)
        for out, dtype in zip(outs, dtypes, strict=True)
    ]
    return jax.tree.unflatten(tree, outs)


def prepare(leaves: Sequence, axes: tuple[str, ...], name: str) -> list[jax.Array]:
    """Makes arrays of the leaves, varying over the axes, or says what is wrong."""
    from jaxcomm.collectives.vary import pvary  # its transpose is a collective

    arrays = as_arrays(list(leaves), axes, name)
    return pvary(arrays, axes) if arrays else arrays


def as_arrays(x, axes: tuple[str, ...], name: str):
    """Returns the pytree with arrays for leaves.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
    """
    _jax_compat.check_axes_bound(axes, name)

    def as_array(leaf):
        if not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)
        ):
            raise TypeError(
                f"{name} over {axes}: every leaf of x must be an array, got "
                f"{type(leaf).__name__}"
            )
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name} over {axes}: x has dtype {leaf.dtype}; send "
                f"jax.random.key_data(x) and wrap what arrives in "
                f"jax.random.wrap_key_data"
            )
        if leaf.dtype.name.startswith("float6_"):
            raise TypeError(
                f"{name} over {axes}: x has dtype {leaf.dtype}, which XLA cannot hand "
                f"to a custom call; cast it first, to bfloat16 without loss"
            )
        return leaf

    return jax.tree.map(as_array, x)


def group_size(axes, index_groups=None) -> int:
    """Returns the number of devices of a group.

    Raises:
      ValueError: if ``axis_index_groups`` are malformed or of unequal sizes.
    """
    size = math.prod(jax.lax.axis_size(axis) for axis in axes)
    if index_groups is None:
        return size
    sizes = {len(group) for group in index_groups}
    if len(sizes) > 1:
        raise ValueError(
            f"axis_index_groups must all be of one size here, got {index_groups}"
        )
    return sizes.pop()


def index_groups_of(axes, axis_index_groups):
    """Returns ``axis_index_groups`` checked against the axes they divide."""
    if axis_index_groups is None:
        return None
    size = math.prod(jax.lax.axis_size(axis) for axis in axes)
    return mesh_groups.canonical_index_groups(axis_index_groups, size)


def count_bools(x):
    """Returns the pytree with bools as int32, the type jax.lax counts them in."""

    def count(leaf):
        is_bool = getattr(leaf, "dtype", None) == jnp.bool_ or isinstance(leaf, bool)
        return jnp.asarray(leaf, jnp.int32) if is_bool else leaf

    return jax.tree.map(count, x)


def canonical_dimension(dimension: int, ndim: int, name: str, what: str) -> int:
    """Returns a dimension counted from the front.

    Raises:
      ValueError: if there is no such dimension.
    """
    if not -ndim <= dimension < ndim:
        raise ValueError(
            f"{name}: {what} {dimension} is out of range for an array of {ndim} "
            f"dimensions"
        )
    return dimension % ndim


def emulate_groups(collective, stacked, size, index_groups, **params) -> list:
    """Computes a collective on operands stacked along axis 0, group by group."""
    if index_groups is None:
        return collective.emulate_all(stacked, size, **params)
    order = np.array([rank for group in index_groups for rank in group])
    parts = [
        collective.emulate_all([x[np.array(g)] for x in stacked], len(g), **params)
        for g in index_groups
    ]
    place = np.argsort(order)
    return [jnp.concatenate(outs)[place] for outs in zip(*parts, strict=True)]


def has_carrier(dtype) -> bool:
    """Says whether arrays of this type travel as a wider one."""
    return dtype.name in _CARRIERS


def _to_carrier(leaf):
    carrier = _CARRIERS.get(leaf.dtype.name)
    return leaf if carrier is None else leaf.astype(carrier)


def _abstract_eval(collective, avals, *, axes, index_groups, invariant, name, **params):
    _jax_compat.check_axes_bound(axes, name)
    for aval in avals:
        _jax_compat.check_not_unreduced(aval, axes, name)
    size = None
    if index_groups is None or len({len(group) for group in index_groups}) == 1:
        size = group_size(axes, index_groups)
    own = {k: v for k, v in params.items() if k not in ("lane", "backend")}
    outs = collective.out_avals(avals, size, **own)
    if _jax_compat.checks_varying_axes():
        varying = frozenset().union(*(aval.mat.varying for aval in avals))
        for i, out in enumerate(outs):
            mine = avals[i].mat.varying if len(outs) == len(avals) else varying
            outs[i] = _jax_compat.with_varying_axes(
                out, mine - frozenset(axes) if invariant else mine
            )
    return [out.update(weak_type=False) for out in outs], (
        _jax_compat.named_axis_effects(axes)
    )


def _batch(collective, axis_data, operands, dims, *, axes, **params):
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    if axis_data.name in axes:
        return batch_own_axis(
            collective, axis_data, operands, dims, axes=axes, **params
        )
    batched = [d is not None for d in dims]
    for param in collective.dimension_params:
        params[param] = tuple(
            dimension + is_batched
            for dimension, is_batched in zip(params[param], batched, strict=True)
        )
    outs = collective.primitive.bind(*operands, axes=axes, **params)
    return outs, [0 if is_batched else None for is_batched in batched]


def batch_own_axis(
    collective, axis_data, operands, dims, *, axes, index_groups, name, lane, backend,
    invariant, **params,
):  # fmt: skip
    """vmap over an axis of the collective: the mapped ranks are here already."""
    size = axis_data.size
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
        for x, d in zip(operands, dims, strict=True)
    ]
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if not rest:
        outs = emulate_groups(collective, stacked, size, index_groups, **params)
        if collective.replicated and index_groups is None:
            return [out[0] for out in outs], [None] * len(outs)
        return outs, [0] * len(outs)

    partial = collective.fold(stacked, **params) if index_groups is None else None
    if partial is not None:
        outs = collective.primitive.bind(
            *partial, axes=rest, index_groups=None, name=name, lane=lane,
            backend=backend, invariant=invariant, **params,
        )  # fmt: skip
        return outs, [None] * len(outs)

    from jaxcomm.collectives.all_gather import all_gather  # itself such a primitive

    place = axes.index(axis_data.name)
    rest_shape = tuple(jax.lax.axis_size(axis) for axis in rest)
    every = all_gather(stacked, rest, lane=lane, backend=backend)
    every = [
        jnp.moveaxis(x.reshape(*rest_shape, *x.shape[1:]), len(rest), place)
        for x in every
    ]
    total = size * math.prod(rest_shape)
    every = [x.reshape(total, *x.shape[len(axes) :]) for x in every]
    outs = emulate_groups(collective, every, total, index_groups, **params)
    ranks_shape = (*rest_shape[:place], size, *rest_shape[place:])
    outs = [
        jnp.moveaxis(out.reshape(*ranks_shape, *out.shape[1:]), place, len(rest))
        for out in outs
    ]
    mine = jax.lax.axis_index(rest)
    outs = [
        jax.lax.dynamic_index_in_dim(
            out.reshape(-1, *out.shape[len(rest) :]), mine, 0, False
        )
        for out in outs
    ]
    return outs, [0] * len(outs)
