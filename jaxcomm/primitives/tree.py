"""Sums by one binary tree over the ranks, made of collectives that only move data.

Neighbours are added first, then the sums of neighbours. The last has no neighbour where
their number is odd, and goes up as it is: nothing is added to it, no zero either. So a
rank that adds its own terms by the same tree, and a power of two of them, gives the
others a node of the tree over all terms, and the bits of the total do not depend on the
number of ranks.

Each slice is added by one rank, and then gathered by all: the bytes of a ring
(Thakur, Rabenseifner and Gropp, 2005, section 4).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.primitives import arguments, lax
from jaxcomm.primitives.call import Call, PyTree, check_array
from jaxcomm.primitives.registry import Bind, Replacement
from jaxcomm.primitives.rounded import rounded

# Up to here a rank fetches all operands, and adds alone: a second message would cost
# more than the bytes that it saves.
_GATHERED_BYTES = 1 << 20
# Where ranks exchange by twos: the same, and up to where they exchange whole operands.
_FEW_BYTES = 64 << 10
_WHOLE_BYTES = 64 << 10


def widen(x):
    """Return ``x`` in the type its reduction accumulates in."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16) or x.dtype.name.startswith("float8")
    return x.astype(jnp.float32) if narrow else x


def add_rows(x: jax.Array) -> jax.Array:
    """Sum over dimension 0, of one row or more, in the type of ``x``."""
    count = x.shape[0]
    whole = 1 << (count.bit_length() - 1)
    if whole < count:
        first, rest = jax.lax.split(x, (whole, count - whole))
        return add_rows(first) + add_rows(rest)
    while x.shape[0] > 1:
        # Not by indexing, whose transpose adds zeros.
        pairs = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
        left, right = jax.lax.split(pairs, (1, 1), axis=1)
        x = jnp.squeeze(left, 1) + jnp.squeeze(right, 1)
    return jnp.squeeze(x, 0)


def local_sum(x: PyTree, axis: int = 0) -> PyTree:
    """Sum over a dimension, by the tree in which reproducible sums add ranks.

    For what a device holds several of, such as the gradients of its microbatches::

        total = jaxcomm.psum(jaxcomm.local_sum(leaves), "data", reproducible=True)

    If all N devices of the axis hold the same number of leaves, in the order of the
    axis, the bits of the total are those on one device that holds all L leaves: if the
    number on each device, L / N, is a power of two. L itself may be any multiple of it.

    bfloat16, float16 and float8 give float32, which ``psum`` adds on. Round the total,
    not the terms: ``total.astype(jnp.bfloat16)``. If you round in between, the number
    of devices decides where.

    Args:
      x: a pytree of arrays of any dtype.
      axis: the dimension of each array that goes away. It has one leaf or more.

    Returns:
      A pytree of arrays: float32 for floats of 16 and 8 bits, int32 for bool, and the
      dtype of ``x`` for all others. Integers wrap around.

    Raises:
      TypeError: if a leaf is not an array, or the axis not an integer.
      ValueError: if there is no such dimension, or it is empty.

    Example:
      >>> jaxcomm.local_sum(jnp.array([1.0, 2.0**-24, 2.0**-24, 2.0**-24]))
      Array(1.0000001, dtype=float32)
      >>> jaxcomm.local_sum(jnp.ones((4, 2), jnp.bfloat16))
      Array([4., 4.], dtype=float32)
    """

    def add(leaf):
        check_array(leaf, "local_sum: every leaf of x")
        leaf = jnp.asarray(leaf)
        at = arguments.canonical_dimension(axis, leaf.ndim, "local_sum", "axis")
        if leaf.shape[at] == 0:
            raise ValueError(
                f"local_sum: dimension {at} of x has size 0, got shape {leaf.shape}. "
                f"Pass one leaf or more"
            )
        leaf = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        rows = rounded(jnp.moveaxis(leaf, at, 0))
        return rounded(add_rows(widen(rows)))

    return jax.tree.map(add, x)


def _added(rows):
    """Sum the rows wide, and round once."""
    return add_rows(widen(rows)).astype(rows.dtype)


def rows_first(x, size, d):
    """Split dimension ``d`` into (size, rest) and bring size to the front."""
    x = x.reshape(*x.shape[:d], size, x.shape[d] // size, *x.shape[d + 1 :])
    return jnp.moveaxis(x, d, 0)


def row_back(row, d, tiled):
    """Return a rank's row of :func:`rows_first` in the form of a slice."""
    # Untiled, dimension ``d`` is of length 1 now, and goes.
    return row if tiled else jnp.squeeze(row, d)


def scattered_sum(bind: Bind, xs: Sequence) -> list:
    """Return this rank's rows of the sums, from (size, ...) on every rank."""
    zeros = (0,) * len(xs)
    rows = bind("all_to_all", xs, split_axes=zeros, concat_axes=zeros)
    return list(map(_added, rows))


def two_phase_sum(bind: Bind, xs: Sequence, size: int) -> list:
    """All-reduce as reduce-scatter and all-gather."""
    flat = [x.reshape(-1) for x in xs]
    rows = [jnp.pad(x, (0, -x.size % size)).reshape(size, -1) for x in flat]
    mine = scattered_sum(bind, rows)
    every = bind("all_gather", mine, dimensions=(0,) * len(xs), tiled=False)
    return [
        row.reshape(-1)[: x.size].reshape(x.shape)
        for row, x in zip(every, xs, strict=True)
    ]


def _all_reduce(collective, bind, xs, **own):
    size = bind.call.result_size
    if size is None:  # groups differ in size
        whole, zeros = bind.over_all_groups(), (0,) * len(xs)
        every = whole("all_gather", xs, dimensions=zeros, tiled=False)
        return list(map(rounded, collective.emulate_here(every, bind.call, **own)))
    small = [i for i, x in enumerate(xs) if x.nbytes * size <= _GATHERED_BYTES]
    large = [i for i in range(len(xs)) if i not in small]
    outs = {}
    if small:
        zeros = (0,) * len(small)
        some = [xs[i] for i in small]
        every = bind("all_gather", some, dimensions=zeros, tiled=False)
        outs |= zip(small, (rounded(_added(rows)) for rows in every), strict=True)
    if large:
        sums = two_phase_sum(bind, [xs[i] for i in large], size)
        outs |= zip(large, sums, strict=True)
    return [outs[i] for i in range(len(xs))]


def _reduce(collective, bind, xs, *, root, **own):
    totals = _all_reduce(collective, bind, xs, **own)
    is_root = jax.lax.axis_index(bind.call.axes) == root
    return [jnp.where(is_root, total, jnp.zeros_like(total)) for total in totals]


def _reduce_scatter(collective, bind, xs, *, dimensions, tiled):
    size = bind.call.group_size
    rows = [rows_first(x, size, d) for x, d in zip(xs, dimensions, strict=True)]
    outs = map(rounded, scattered_sum(bind, rows))
    return [row_back(out, d, tiled) for out, d in zip(outs, dimensions, strict=True)]


_RULES = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}


def in_pairs(
    collective, avals: Sequence, call: Call, size: int, **own
) -> Replacement | None:
    """Return what adds where ranks exchange by twos, or None: for XLA on CPU devices.

    XLA copies the operand twice there for an all-to-all, and not for a permutation.
    Neighbours exchange halves, and add one each. Then their sums are exchanged by twos,
    and so on. The parts come to lie in the order of the ranks' reversed bits. XLA's own
    sum of two ranks would be shorter, but it begins with a zero, and loses -0.

    Source: recursive halving and doubling, Thakur, Rabenseifner and Gropp, 2005,
    sections 4.1 and 4.3.

    Args:
      collective: that is called.
      avals: its operands' types on one rank.
      call: the call.
      size: the number of ranks of the largest group.
      **own: the collective's own parameters.
    """
    groups = call.index_groups or (tuple(range(size)),)
    is_power = size & (size - 1) == 0 and {len(group) for group in groups} == {size}
    of_several_axes = call.index_groups is not None and len(call.axes) > 1
    if collective.name != "all_reduce" or not is_power or of_several_axes:
        return None
    if in_tree(collective, avals, **own) is None:
        return None
    bits = [1 << i for i in range(size.bit_length() - 1)]
    reversed_bits = [int(f"{r:0{len(bits)}b}"[::-1], 2) for r in range(size)]
    in_order = [[group[r] for r in reversed_bits] for group in groups]
    rank_in_group = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        rank_in_group[list(group)] = range(size)

    def from_partner(x, bit):
        """Exchange with the rank that differs in this bit."""
        if len(call.axes) == 1:
            pairs = [
                (group[r], group[r ^ bit]) for group in groups for r in range(size)
            ]
            return lax.ppermute(x, call.axes, pairs)
        # Along the axis that has the bit: over several, jax.lax.ppermute numbers the
        # ranks in the order of the mesh, and not of the call.
        axes = list(call.axes)
        while bit >= compat.axis_size(axes[-1]):
            bit //= compat.axis_size(axes.pop())
        ranks = range(compat.axis_size(axes[-1]))
        return lax.ppermute(x, axes[-1], [(r, r ^ bit) for r in ranks])

    def add_whole(x):
        # Apart from a product, which would be added before it is rounded.
        total = rounded(x)
        for bit in bits:
            total = widen(total) + widen(from_partner(total, bit))
        # XLA passes on what was before a rounding to 16 bits.
        return total if total.dtype == x.dtype else rounded(total.astype(x.dtype))

    def add_parts(x):
        rank = jnp.asarray(rank_in_group)[jax.lax.axis_index(call.axes)]
        part = jnp.pad(x.reshape(-1), (0, -x.size % size))
        for bit in bits:
            halves, upper = part.reshape(2, -1), (rank // bit) % 2
            mine, sent = (
                jax.lax.dynamic_index_in_dim(halves, half, keepdims=False)
                for half in (upper, 1 - upper)
            )
            mine = rounded(mine) if bit == 1 else mine
            part = widen(mine) + widen(from_partner(sent, bit))
        part = part.astype(x.dtype)
        every = lax.all_gather(part, call.axes, axis_index_groups=in_order, tiled=True)
        return every[: x.size].reshape(x.shape)

    def add(bind, x):
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        if not is_float or (size > 2 and x.nbytes * size <= _FEW_BYTES):
            return _all_reduce(collective, bind, [x], **own)[0]
        return (add_whole if size == 2 or x.nbytes <= _WHOLE_BYTES else add_parts)(x)

    return lambda bind, xs: [add(bind, x) for x in xs]


def in_tree(collective, avals: Sequence, **own) -> Replacement | None:
    """Return what adds floats in the place of a collective; None for all others."""
    rule = _RULES.get(collective.name)
    has_floats = any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
    if rule is None or own.get("op", "sum") != "sum" or not has_floats:
        return None
    return lambda bind, xs: rule(collective, bind, xs, **own)
