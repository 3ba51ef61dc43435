"""All-to-all: all_to_all, pswapaxes."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def all_to_all(
    x, axis_name, split_axis, concat_axis, *, axis_index_groups=None, tiled=False,
    lane=None, backend=None,
):  # fmt: skip
    """Gives slice r to device r and lays out what arrives; a twin of jax.lax's.

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
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if the size of ``split_axis`` does not fit the axis size.

    Example:
      On a mesh of 2 devices along ``"i"``, with [0, 1] and [2, 3] on them:

      >>> jaxcomm.all_to_all(x, "i", 0, 0, tiled=True)  # doctest: +SKIP
      Array([0, 2], dtype=int32)  # on the first, [1, 3] on the second
    """
    return exchange(
        "all_to_all", x, axis_name, split_axis, concat_axis, axis_index_groups, tiled,
        lane, backend,
    )  # fmt: skip


def pswapaxes(x, axis_name, axis, *, axis_index_groups=None, lane=None, backend=None):
    """Swaps a mesh axis with a dimension of ``x``; a twin of ``jax.lax.pswapaxes``.

    The same as ``all_to_all(x, axis_name, axis, axis)``.

    Example:
      On a mesh of 2 devices along ``"i"``, with [0, 1] and [2, 3] on them:

      >>> jaxcomm.pswapaxes(x, "i", 0)  # [0, 2], [1, 3]  # doctest: +SKIP
    """
    return exchange(
        "pswapaxes", x, axis_name, axis, axis, axis_index_groups, False, lane, backend,
        called=("axis", "axis"),
    )  # fmt: skip


def exchange(
    name: str, x, axis_name, split_axis, concat_axis, axis_index_groups, tiled, lane,
    backend, bind=define.bind, called=("split_axis", "concat_axis"),
):  # fmt: skip
    """Checks an all-to-all and hands it to ``bind``, for the function ``name``.

    ``called``: what it calls the two axes.
    """
    axes = replica_groups.canonical_axes(axis_name)
    if not axes:
        return x
    tiled = define.flag(tiled, f"{name} over {axes}: tiled")
    x = define.as_arrays(x, axes, name)
    index_groups = define.index_groups_of(axes, axis_index_groups, name)
    size = define.group_size(axes, index_groups)
    leaves, tree = jax.tree.flatten(x)
    split_axes, concat_axes, inserted = [], [], []
    for i, leaf in enumerate(leaves):
        ndim = jnp.ndim(leaf)
        split = define.canonical_dimension(split_axis, ndim, name, called[0])
        concat = define.canonical_dimension(concat_axis, ndim, name, called[1])
        extent = jnp.shape(leaf)[split]
        if tiled and extent % size != 0:
            raise ValueError(
                f"{name}: dimension {split} of x has size {extent}, not divisible by "
                f"the {size} devices of axes {axes}. Pad x or choose another "
                f"split_axis."
            )
        if not tiled and extent != size:
            raise ValueError(
                f"{name}: dimension {split} of x has size {extent}, but axes {axes} "
                f"have {size} devices. They must be equal, or pass tiled=True"
                f"{' to all_to_all' if name == 'pswapaxes' else ''}."
            )
        squeeze = None
        if not tiled and split != concat:
            # concat_axis counts in the result, where split_axis is gone: it becomes a
            # dimension of size 1 that grows, and split_axis one that shrinks to 1.
            concat += split < concat
            leaves[i] = jnp.expand_dims(leaf, concat)
            split += concat < split or concat == split
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

    return bind(
        all_to_all_impl, leaves, axes, name=name, index_groups=index_groups, lane=lane,
        backend=backend, split_axes=tuple(split_axes), concat_axes=tuple(concat_axes),
        finish=finish,
    )  # fmt: skip


class AllToAll(define.Collective):
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

    def xla(self, xs, axes, index_groups, *, split_axes, concat_axes):
        return [
            jax.lax.all_to_all(
                x, axes, split, concat, axis_index_groups=index_groups, tiled=True
            )
            for x, split, concat in zip(xs, split_axes, concat_axes, strict=True)
        ]

    def dual(self, *, split_axes, concat_axes, **params):
        return self, {"split_axes": concat_axes, "concat_axes": split_axes, **params}


all_to_all_impl = AllToAll()
all_to_all_p = define.define(all_to_all_impl)
