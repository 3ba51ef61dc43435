"""The transpose of every collective, in one table.

Some collectives are each other's transposes. Here all of them exist, so that none
imports another.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxcomm.collectives import (
    all_gather,  # noqa: F401 -- each defines a collective
    all_reduce,
    all_to_all,  # noqa: F401
    barrier,  # noqa: F401
    permute,  # noqa: F401
    ragged_all_to_all,  # noqa: F401
    reduce_scatter,  # noqa: F401
    rooted,  # noqa: F401
    scan,  # noqa: F401
)
from jaxcomm.primitives import registry
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.collective import COLLECTIVES, Transposed, bound
from jaxcomm.primitives.pvary import cast, pvary_p, vary
from jaxcomm.primitives.request import Request


def _all_gather(call: Call, *, dimensions, tiled) -> Transposed:
    if call.invariant:
        return lambda cts, operands: _own_parts(cts, call, dimensions, tiled)
    given = "unreduced" if call.to == "reduced" else "varying"
    back = call.replace(given=given, to="varying")
    return bound("reduce_scatter", back, dimensions=dimensions, tiled=tiled)


def _own_parts(cts: Sequence, call: Call, dimensions, tiled) -> list:
    """Take the part that belongs to this rank of a cotangent that all ranks share."""
    size, rank = call.group_size, jax.lax.axis_index(call.axes)
    parts = []
    for ct, d in zip(cts, dimensions, strict=True):
        width = ct.shape[d] // size
        part = jax.lax.dynamic_slice_in_dim(ct, rank * width, width, d)
        parts.append(part if tiled else jnp.squeeze(part, d))
    return parts


def _reduce_scatter(call: Call, **params) -> Transposed:
    to = "reduced" if call.given == "unreduced" else "varying"
    return bound("all_gather", call.replace(given="varying", to=to), **params)


def _all_reduce(call: Call, *, op) -> Transposed:
    if not call.invariant:
        # Every rank's result counts by itself, and they are summed.
        return bound("all_reduce", call, op=op)
    # Each rank's operand counts once in the one result.
    to = "reduced" if call.given == "unreduced" else "varying"
    size = call.group_size if op == "mean" else 1

    def spread(cts, operands):
        return cast([ct / size if size > 1 else ct for ct in cts], call.replace(to=to))

    return spread


def _all_to_all(call: Call, *, split_axes, concat_axes) -> Transposed:
    return bound("all_to_all", call, split_axes=concat_axes, concat_axes=split_axes)


def _permute(call: Call, *, perm) -> Transposed:
    inverse = tuple((target, source) for source, target in perm)
    return bound("permute", call, perm=inverse)


def _scan(call: Call, *, reverse, **params) -> Transposed:
    return bound("scan", call, reverse=not reverse, **params)


def _reduce(call: Call, *, root, op) -> Transposed:
    return bound("broadcast", call, root=root)


def _broadcast(call: Call, *, root) -> Transposed:
    return bound("reduce", call, root=root, op="sum")


def _slices_of_rows(x: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Count the slices that hold each row of ``x``, in a shape to compare with it."""
    rows = jnp.arange(x.shape[0], dtype=offsets.dtype)[:, None]
    first, end = offsets[None], (offsets + sizes)[None]
    count = ((rows >= first) & (rows < end)).sum(axis=1)
    return count.reshape(-1, *(1,) * (x.ndim - 1))


def _ragged_all_to_all(call: Call) -> Transposed:
    def transposed(cts, operands):
        (ct,) = cts
        operand, _, input_offsets, send_sizes, output_offsets, recv_sizes = operands
        where, there = registry.bind(
            "all_to_all",
            [output_offsets, input_offsets],
            call.replace(name="all_to_all"),
            split_axes=(0, 0),
            concat_axes=(0, 0),
        )
        is_linear = ad.is_undefined_primal(operand)
        shape = operand.aval.shape if is_linear else operand.shape
        (zero,) = vary([jnp.zeros(shape, ct.dtype)], call)
        sent_back = [ct, zero, where, recv_sizes, there, send_sizes]
        (operand_ct,) = registry.bind("ragged_all_to_all", sent_back, call)
        is_received = _slices_of_rows(ct, where, recv_sizes) > 0
        output_ct = jnp.where(is_received, jnp.zeros_like(ct), ct)
        return [operand_ct, output_ct, None, None, None, None]

    return transposed


TRANSPOSES: dict[str, Callable[..., Transposed]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": lambda call: bound("barrier", call),
    "broadcast": _broadcast,
    "gather": lambda call, **params: bound("scatter", call, **params),
    "permute": _permute,
    "ragged_all_to_all": _ragged_all_to_all,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "scatter": lambda call, **params: bound("gather", call, **params),
}

for _name, _rule in TRANSPOSES.items():
    COLLECTIVES[_name].transposed = _rule


def _pvary(cts, *operands, call: Call):
    cts = [ad.instantiate_zeros(ct) for ct in cts]
    given = "unreduced" if call.to == "reduced" else "varying"
    back = call.replace(name="psum", given=given, to="invarying")
    return Request(all_reduce.ALL_REDUCE, cts, back, op="sum").run()


ad.primitive_transposes[pvary_p] = _pvary
