"""Rewrite collectives, dtypes and layouts that NCCL does not support into ones it does.

NCCL sends contiguous pieces of any type. It reduces numbers of 8, 32 and 64 bits,
float16 and bfloat16, over all ranks. XLA converts and transposes around it.

A rule is given the collective, its operands' types on one rank, what serves them and
the collective's own parameters. It returns a ``function(bind, xs) -> outs``, or
None where NCCL does the collective as it is.
"""

import math

import jax
import jax.numpy as jnp

from jaxcomm.primitives.registry import ANY, Rule
from jaxcomm.primitives.tree import row_back, rows_first, scattered_sum, two_phase_sum

# Above this a sum of 16-bit floats is taken apart, so that no more bytes travel than
# without float32 sums; below it that would cost a second trip.
_TWO_PHASE_BYTES = 1 << 20

# Up to this, the operands of a group are gathered in ragged_all_to_all. Above it the
# host reads offsets and sizes, for which the GPU's queue runs empty.
_GATHERED_BYTES = 8 << 20

# The least bytes of a row, and of all rows that a rank sends, to be sent as they lie by
# all_to_all; and of a copy, on average: engine_choice.h.
_LEAST_ROW_BYTES = 512
_LEAST_STRIDED_BYTES = 32 << 20
_LEAST_BYTES_OF_COPY = 1 << 20
_LEAST_BYTES_OF_KERNEL, _MOST_ARRAYS, _QUAD_BYTES = 128 << 10, 4, 16

# The offsets and sizes of a rank that the host reads: DataDependent::kMostBytes.
_READ_BYTES = 16 << 10


def _with_bytes(collective, avals, served, **own):
    """Send the tangents of integers, which hold nothing, as bytes."""
    if not any(aval.dtype == jax.dtypes.float0 for aval in avals):
        return None

    def of_bytes(bind, xs):
        empty = [x.dtype == jax.dtypes.float0 for x in xs]
        outs = bind(
            collective.name,
            [
                jnp.zeros(x.shape, jnp.int8) if is_empty else x
                for x, is_empty in zip(xs, empty, strict=True)
            ],
            **own,
        )
        return [
            out.astype(bool) if is_empty else out
            for out, is_empty in zip(outs, empty, strict=True)
        ]

    return of_bytes


def _wire_type(dtype, op, size):
    """Return the type a reduction travels in; None if NCCL has none that serves."""
    if dtype.name == "float8_e8m0fnu":
        # float8_e8m0fnu has no zero; reduce it by gathering (see _gathered).
        return None
    if dtype.name.startswith("float8"):
        return jnp.dtype("float32")
    if dtype in (jnp.bfloat16, jnp.float16):
        # Of two numbers the sum is rounded once in either type.
        exact = op in ("max", "min") or (op == "sum" and size == 2)
        return dtype if exact else jnp.dtype("float32")
    if dtype in (jnp.int16, jnp.uint16):
        return jnp.dtype("int32" if dtype == jnp.int16 else "uint32")
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype if op == "sum" else None
    if dtype == jnp.bool_:
        return dtype if op in ("max", "min") else None
    return dtype


def _reduction(collective, avals, served, *, op, **own):
    """Reduce in a type that NCCL reduces well; all_reduce and reduce."""
    wires = [_wire_type(aval.dtype, op, served.size) for aval in avals]
    pairs = zip(wires, avals, strict=True)
    if all(wire is not None and wire == aval.dtype for wire, aval in pairs):
        return None

    def in_wire_types(bind, xs):
        outs = {}
        may_part = (collective.name, op) == ("all_reduce", "sum")
        may_part &= bind.call.index_groups is None
        alone = [i for i, wire in enumerate(wires) if wire is None]
        if alone:
            gather = _gathered(collective, avals, served, op=op, **own)
            outs |= zip(alone, gather(bind, [xs[i] for i in alone]), strict=True)
        for i, x in enumerate(xs):
            is_long = x.dtype.itemsize == 2 and x.nbytes > _TWO_PHASE_BYTES
            if may_part and is_long and wires[i] == jnp.float32:
                (outs[i],) = two_phase_sum(bind, [x], served.size)
        rest = [i for i in range(len(xs)) if i not in outs]
        if rest:
            wide = [xs[i].astype(wires[i]) for i in rest]
            sums = bind(collective.name, wide, op=op, **own)
            for i, total in zip(rest, sums, strict=True):
                outs[i] = total.astype(xs[i].dtype)
        return [outs[i] for i in range(len(xs))]

    return in_wire_types


def _reduce_scatter(collective, avals, served, *, dimensions, tiled):
    wires = [_wire_type(aval.dtype, "sum", served.size) for aval in avals]
    same = all(wire == aval.dtype for wire, aval in zip(wires, avals, strict=True))
    if same and _is_contiguous(avals, dimensions):
        return None

    def of_rows(bind, xs):
        rows = [
            rows_first(x, served.size, d) for x, d in zip(xs, dimensions, strict=True)
        ]  # (size, rows of one rank, ...)
        outs: list = [None] * len(xs)
        narrow = [i for i, x in enumerate(rows) if wires[i] == jnp.float32 != x.dtype]
        if narrow:
            for i, out in zip(
                narrow, scattered_sum(bind, [rows[i] for i in narrow]), strict=True
            ):
                outs[i] = out
        rest = [i for i in range(len(xs)) if i not in narrow]
        if rest:
            wide = [rows[i].astype(wires[i]) for i in rest]
            sums = bind(
                "reduce_scatter", wide, dimensions=(0,) * len(rest), tiled=False
            )
            for i, out in zip(rest, sums, strict=True):
                outs[i] = out.astype(xs[i].dtype)
        return [
            row_back(out, d, tiled) for out, d in zip(outs, dimensions, strict=True)
        ]

    return of_rows


def _is_contiguous(avals, dimensions):
    """Say whether the part of each rank is contiguous, for every leaf."""
    pairs = zip(avals, dimensions, strict=True)
    return all(math.prod(aval.shape[:d]) <= 1 for aval, d in pairs)


def _gathering(collective, avals, served, *, dimensions, tiled, **root):
    """Gather and all-gather along the first dimension; XLA transposes."""
    if _is_contiguous(avals, dimensions):
        return None

    def to_front(bind, xs):
        zeros = (0,) * len(xs)
        every = bind(collective.name, xs, dimensions=zeros, tiled=False, **root)
        return [
            _from_front(x, d, tiled) for x, d in zip(every, dimensions, strict=True)
        ]

    return to_front


def _from_front(x, d, tiled):
    x = jnp.moveaxis(x, 0, d)
    if not tiled:
        return x
    return x.reshape(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])


def _scatter(collective, avals, served, *, root, dimensions, tiled):
    if _is_contiguous(avals, dimensions):
        return None

    def of_rows(bind, xs):
        rows = [
            rows_first(x, served.size, d) for x, d in zip(xs, dimensions, strict=True)
        ]
        zeros = (0,) * len(xs)
        outs = bind("scatter", rows, root=root, dimensions=zeros, tiled=False)
        return [
            row_back(out, d, tiled) for out, d in zip(outs, dimensions, strict=True)
        ]

    return of_rows


def _all_to_all(collective, avals, served, *, split_axes, concat_axes):
    """Transpose rows, unless they are moved as they lie.

    Kernels move rows of whole quads of words. Copy engines move long rows of many
    bytes.
    """
    size = served.size
    # Of each leaf: its rows and messages for a rank, and the bytes of a row.
    leaves = []
    for aval, split, concat in zip(avals, split_axes, concat_axes, strict=True):
        outer, middle, _ = collective.planner_params(
            [aval], size, split_axes=[split], concat_axes=[concat]
        )
        rows, whole = outer * middle, aval.size * aval.dtype.itemsize // size
        leaves.append((rows, outer, whole // max(1, rows)))
    sent = (size - 1) * sum(n * row for n, _, row in leaves)
    if served.row_mover == "kernels":
        is_moved = (
            len(leaves) <= _MOST_ARRAYS
            and sent >= _LEAST_BYTES_OF_KERNEL
            and all(row % _QUAD_BYTES == 0 for _, _, row in leaves)
        )
        is_strided = [is_moved and n != 1 for n, _, _ in leaves]
    else:
        is_strided = [n != 1 and row >= _LEAST_ROW_BYTES for n, _, row in leaves]
        messages = sum(
            outer if strided else 1
            for strided, (_, outer, _) in zip(is_strided, leaves, strict=True)
        )
        least = (2 * size - 1) * messages * _LEAST_BYTES_OF_COPY
        if served.row_mover is None or sent < max(_LEAST_STRIDED_BYTES, least):
            is_strided = [False] * len(leaves)
    moved = [i for i, (n, _, _) in enumerate(leaves) if n != 1 and not is_strided[i]]
    if not moved and not any(is_strided):
        return None

    def exchanged(bind, xs):
        sent, splits, concats = list(xs), list(split_axes), list(concat_axes)
        for i in moved:
            sent[i] = rows_first(xs[i], size, split_axes[i])
            splits[i] = concats[i] = 0
        name = "all_to_all_with_room" if any(is_strided) else "all_to_all"
        outs = bind(name, sent, split_axes=tuple(splits), concat_axes=tuple(concats))
        outs = list(outs[: len(xs)])
        for i in moved:
            outs[i] = _from_front(outs[i], concat_axes[i], tiled=True)
        return outs

    return exchanged


def _ragged_all_to_all(collective, avals, served):
    """Gather small operands, and whatever has more slices than the host reads."""
    operand, _, *numbers = avals
    gathered = served.size * operand.size * operand.dtype.itemsize
    read = sum(x.size * x.dtype.itemsize for x in numbers)
    if gathered > _GATHERED_BYTES and read <= _READ_BYTES:
        return None

    def exchanged(bind, xs):
        operand, output, *indices = xs
        indices = [x.astype(jnp.arange(0).dtype) for x in indices]

        def gather(xs):
            zeros = (0,) * len(xs)
            whole = bind.over_all_groups()
            return whole("all_gather", xs, dimensions=zeros, tiled=False)

        return collective.by_gathering([operand, output, *indices], bind.call, gather)

    return exchanged


def _gathered(collective, avals, served, **own):
    """Compute the collective on every rank from the operands of all ranks."""

    def of_everybody(bind, xs):
        zeros = (0,) * len(xs)
        whole = bind.over_all_groups()
        every = whole("all_gather", xs, dimensions=zeros, tiled=False)
        return collective.emulate_here(every, bind.call, **own)

    return of_everybody


def _unchecked(collective, avals, served):
    """Check nothing: the numbers are on the device, where the host cannot read them."""
    return lambda bind, xs: list(xs)


RULES: dict[str, Rule] = {
    ANY: _with_bytes,
    "all_gather": _gathering,
    "all_reduce": _reduction,
    "all_to_all": _all_to_all,
    "check_positions": _unchecked,
    "check_step": _gathered,
    "gather": _gathering,
    "ragged_all_to_all": _ragged_all_to_all,
    "reduce": _reduction,
    "reduce_scatter": _reduce_scatter,
    "scan": _gathered,
    "scatter": _scatter,
}
