"""All-to-all: all_to_all, pswapaxes."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.primitives import arguments, lax, request
from jaxcomm.primitives.call import AxisIndexGroups, AxisName, Call, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public


@public
def all_to_all(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Give slice r to device r; a twin of ``jax.lax.all_to_all``.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      split_axis: the dimension of ``x`` that is cut into one slice for each device.
      concat_axis: the dimension of the result along which the slices are laid out, in
        the order of the devices they come from.
      axis_index_groups: groups, of one size, to exchange within. If None, all.
      tiled: keep both dimensions: ``split_axis`` is divided by the axis size and
        ``concat_axis`` multiplied. Otherwise ``split_axis``, of the size of the axis,
        goes away and a dimension of that size comes in at ``concat_axis``.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if the size of ``split_axis`` does not fit the axis size.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(16))[:8]
      Array([ 0,  4,  8, 12,  1,  5,  9, 13], dtype=int32)
    """
    call = call_of(name, axis_name, axis_index_groups, lane, backend)
    return _exchange(x, call, split_axis, concat_axis, tiled)


@public
def pswapaxes(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Swap a mesh axis with a dimension of ``x``; a twin of ``jax.lax.pswapaxes``.

    The same as ``all_to_all(x, axis_name, axis, axis)``.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pswapaxes(x, "i", 0),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(16))[:8]
      Array([ 0,  4,  8, 12,  1,  5,  9, 13], dtype=int32)
    """
    call = call_of(name, axis_name, axis_index_groups, lane, backend)
    return _exchange(x, call, axis, axis, False, ("axis", "axis"))


def _exchange(
    x: PyTree,
    call: Call,
    split_axis: int,
    concat_axis: int,
    tiled: bool,
    called: tuple[str, str] = ("split_axis", "concat_axis"),
) -> Request:
    """Check an all-to-all whose function has ``called`` the axes."""
    if not call.axes:
        return Request.ready(ALL_TO_ALL, call, x)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    leaves, tree = jax.tree.flatten(x)
    split_axes, concat_axes, inserted = [], [], []
    for i, leaf in enumerate(leaves):
        split = arguments.split_dimension(
            split_axis, jnp.shape(leaf), tiled, call, called[0]
        )
        concat = arguments.canonical_dimension(
            concat_axis, jnp.ndim(leaf), call.name, called[1]
        )
        squeeze = None
        if not tiled and split != concat:
            # concat_axis counts in the result, where split_axis is gone: it becomes a
            # dimension of size 1 that grows, and split_axis one that shrinks to 1.
            concat += split < concat
            leaves[i] = jnp.expand_dims(leaf, concat)
            split += concat < split
            squeeze = split
        split_axes.append(split)
        concat_axes.append(concat)
        inserted.append(squeeze)

    def finish(outs):
        outs = [
            out if squeeze is None else jnp.squeeze(out, squeeze)
            for out, squeeze in zip(outs, inserted, strict=True)
        ]
        return jax.tree.unflatten(tree, outs)

    return Request(
        ALL_TO_ALL,
        leaves,
        call,
        finish=finish,
        split_axes=tuple(split_axes),
        concat_axes=tuple(concat_axes),
    )


class AllToAll(Collective):
    """Tiled exchange. Parameters: split_axes and concat_axes, one for each leaf."""

    name = "all_to_all"
    dimension_params = ("split_axes", "concat_axes")

    def shape(self, shape, size, i, *, split_axes, concat_axes):
        out = list(shape)
        out[split_axes[i]] //= size
        out[concat_axes[i]] *= size
        return out

    def planner_params(self, avals, size, *, split_axes, concat_axes, **_):
        params = []
        for aval, split, concat in zip(avals, split_axes, concat_axes, strict=True):
            first, second = sorted((split, concat))
            between = aval.shape[first:second]
            if split < concat:
                # [outer, size, rest of split .. before concat, concat ..]
                params += [math.prod(aval.shape[:first]), math.prod(between) // size, 1]
            else:
                params += [math.prod(aval.shape[:first]), math.prod(between), 0]
        return params

    def emulate(self, x, i, *, split_axes, concat_axes):
        size, split, concat = x.shape[0], split_axes[i] + 1, concat_axes[i] + 1
        pieces = jnp.stack(jnp.split(x, size, axis=split))  # [target, source, ...]
        moved = jnp.moveaxis(pieces, 1, concat)  # [target, ..., source, concat, ...]
        shape = list(pieces.shape[:1] + pieces.shape[2:])
        shape[concat] *= size
        return moved.reshape(shape)

    def xla(self, xs, call, *, split_axes, concat_axes):
        groups = call.index_groups
        return [
            lax.all_to_all(
                x, call.axes, split, concat, axis_index_groups=groups, tiled=True
            )
            for x, split, concat in zip(xs, split_axes, concat_axes, strict=True)
        ]


class WithRoom(AllToAll):
    """The same for NCCL, which packs what is not contiguous before it sends it.

    Behind the results there is one more array for each leaf that is not contiguous, of
    the operand's shape: room to pack it in. Copy engines need none.
    """

    name = "all_to_all_with_room"
    planner = "all_to_all"

    def out_avals(self, avals, size, **params):
        outs = super().out_avals(avals, size, **params)
        found = self.planner_params(avals, size, **params)
        rows = zip(avals, found[::3], found[1::3], strict=True)
        return outs + [aval for aval, a, b in rows if aval.size and a * b != 1]


ALL_TO_ALL = AllToAll()
define(ALL_TO_ALL)
define(WithRoom())
