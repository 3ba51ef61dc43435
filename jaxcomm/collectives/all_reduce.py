"""All-reduce: psum, pmean, pmax, pmin, pprod."""

import math

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.collectives.stacked import REDUCERS, reduce_stacked
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import lax, request
from jaxcomm.primitives.call import (
    AxisIndexGroups,
    AxisName,
    Call,
    PyTree,
    call_of,
    chosen_reproducible,
)
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.gathered import all_gather, emulate_groups, gathered
from jaxcomm.primitives.request import Request, public
from jaxcomm.primitives.rounded import rounded
from jaxcomm.primitives.tree import widen


@public
def psum(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
    reproducible: bool | None = None,
) -> Request:
    """Sum ``x`` over the devices of a mesh axis; a twin of ``jax.lax.psum``.

    bfloat16, float16 and float8 accumulate in float32; bool counts in int32. NCCL and
    XLA choose the order in which they add. All devices get the same bits.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names to sum over jointly. Integers
        among them name dimensions of ``x`` to sum over as well.
      axis_index_groups: groups of indices to sum within instead. If None, all.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      reproducible: True adds in one order on every number of ranks and every backend:
        by a binary tree over the index along the axis, rounded once. With
        :func:`jaxcomm.local_sum` of the terms of each rank, the bits of the total do
        not depend on the number of ranks. If None, as :func:`jaxcomm.using` says, else
        False. The ``host`` backend always adds so.

    Returns:
      A pytree like ``x``, typed as equal on all devices of the axis (unless there
      are ``axis_index_groups``).

    Raises:
      NameError: if the axis is not bound by ``jax.shard_map`` or ``jax.vmap``.
      TypeError: if reproducible is not True, False or None.
      ValueError: if ``axis_index_groups`` do not hold every index once, or dimensions
        are to be summed reproducibly.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.psum(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> f(jnp.arange(4.0))
      Array([6.], dtype=float32)
    """
    options = axis_index_groups, lane, backend, reproducible
    return reduction(name, "sum", x, axis_name, *options)


def pmean(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
    reproducible: bool | None = None,
) -> PyTree:
    """Average ``x`` over the devices of a mesh axis; a twin of ``jax.lax.pmean``.

    Arguments, result and errors are those of :func:`psum`; integers give floats, and
    groups must be of one size. NCCL multiplies float32 and float64 by one over the
    number of ranks before it adds them: where that is no power of two, last bits differ
    from those of a sum that is divided. ``reproducible=True`` divides the sum, and
    rounds once: bfloat16, float16 and float8 then travel as float32.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pmean(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> f(jnp.arange(4.0))
      Array([1.5], dtype=float32)
    """
    reproducible = chosen_reproducible(reproducible, "pmean")
    options = axis_index_groups, lane, backend, reproducible
    x = request.count_bools(x)
    is_plain = axis_index_groups is None and not reproducible
    if is_plain and _is_averaged(x, axis_name):
        return reduction("pmean", "mean", x, axis_name, *options).run()
    terms = jax.tree.map(_widened, x) if reproducible else x
    total = reduction("pmean", "sum", terms, axis_name, *options).run()
    positional, axes = _split_axes("pmean", axis_name)
    # jax.lax divides by the size of the first group, whatever the others have.
    size = call_of("pmean", axes, axis_index_groups).group_size

    def divide(total, x):
        count = size * math.prod(jnp.shape(x)[axis] for axis in positional)
        if not reproducible:
            return total / count
        mean = _quotient(total, count)
        return rounded(mean.astype(x.dtype)) if _is_narrow(x) else mean

    return jax.tree.map(divide, total, x)


def _quotient(x, count: int):
    """Divide, and round once: XLA would multiply floats by one over a constant."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x / count
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_quotient(x.real, count), _quotient(x.imag, count))
    # Not a constant to XLA, and NaN over NaN is NaN.
    return x / jnp.where(jnp.isnan(x), x, jnp.full((), count, x.dtype))


def _is_narrow(leaf) -> bool:
    """Say whether a leaf is added in a wider type than its own."""
    return hasattr(leaf, "dtype") and widen(leaf).dtype != leaf.dtype


def _widened(leaf):
    """Return a leaf in the type it is added in, so that the mean alone is rounded."""
    if not _is_narrow(leaf):
        return leaf
    # What a rank sends: XLA would pass on what was before a rounding to 16 bits.
    return widen(rounded(leaf) if compat.is_tracer(leaf) else leaf)


@public
def pmax(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Take the maximum over a mesh axis; a twin of ``jax.lax.pmax``.

    On the host backend NaN wins over numbers. NCCL and XLA treat NaN in ways of their
    own. Complex numbers compare lexicographically. Arguments, result and errors are
    those of :func:`psum`. Differentiable, unlike ``jax.lax.pmax``: the gradient goes to
    the devices that hold the maximum, in equal parts.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pmax(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> f(jnp.arange(4.0))
      Array([3.], dtype=float32)
    """
    return reduction(name, "max", x, axis_name, axis_index_groups, lane, backend)


@public
def pmin(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Take the minimum over a mesh axis; a twin of ``jax.lax.pmin``.

    Everything :func:`pmax` says holds for minima too.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pmin(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> f(jnp.arange(4.0))
      Array([0.], dtype=float32)
    """
    return reduction(name, "min", x, axis_name, axis_index_groups, lane, backend)


@public
def pprod(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Multiply ``x`` over the devices of a mesh axis; jax.lax has no such function.

    Arguments, result and errors are those of :func:`psum`; bool counts in int32.
    Differentiable, also where factors are zero; the gradient gathers ``x``.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pprod(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> f(jnp.arange(1.0, 5.0))
      Array([24.], dtype=float32)
    """
    return reduction(name, "prod", x, axis_name, axis_index_groups, lane, backend)


def _split_axes(name: str, axis_name: AxisName) -> tuple[tuple[int, ...], tuple]:
    """Return the dimensions among the axes, and the names."""
    given = replica_groups.canonical_axes(axis_name)
    if any(isinstance(axis, bool) for axis in given):
        raise TypeError(f"{name}: an axis is a name or an integer, got {given}")
    positional = tuple(axis for axis in given if isinstance(axis, int))
    return positional, tuple(axis for axis in given if not isinstance(axis, int))


def _is_averaged(x, axis_name):
    """Say whether the average is one operation, which NCCL has."""
    positional, _ = _split_axes("pmean", axis_name)
    leaves = jax.tree.leaves(x)
    return not positional and all(
        compat.is_tracer(leaf) and leaf.dtype in (jnp.float32, jnp.float64)
        for leaf in leaves
    )


def _is_rounded(x, call: Call) -> bool:
    """Say whether a tree of equal terms is rounded, as their multiple is not."""
    groups = call.index_groups
    sizes = [call.axes_size] if groups is None else list(map(len, groups))
    is_exact = all(size & (size - 1) == 0 for size in sizes)
    return (
        call.reproducible
        and not is_exact
        and any(
            jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
            for leaf in jax.tree.leaves(x)
        )
    )


def reduction(
    name: str,
    op: str,
    x: PyTree,
    axis_name: AxisName,
    groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
    reproducible: bool | None = None,
) -> Request:
    """Check an all-reduce, for the function ``name``."""
    if op in ("sum", "prod"):
        x = request.count_bools(x)
    positional, axes = _split_axes(name, axis_name)
    if positional and groups is not None:
        raise ValueError(
            f"{name}: axis_index_groups go with axis names alone, got axes {axis_name}"
        )
    call = call_of(name, axes, groups, lane, backend, reproducible)
    if positional and call.reproducible and op == "sum":
        raise ValueError(
            f"{name}: reproducible sums are over axis names, got axes {axis_name}. "
            f"Call jaxcomm.local_sum first, for the dimensions"
        )
    if positional:
        x = jax.tree.map(
            lambda leaf: REDUCERS[op](leaf, axis=positional).astype(leaf.dtype), x
        )
    if not axes:
        return Request.ready(ALL_REDUCE, call, x)
    is_constant = not any(map(compat.is_tracer, jax.tree.leaves(x)))
    # Where groups differ in size, so do their sums: jax.lax gives all the first's.
    is_constant = is_constant and call.result_size is not None
    if op == "sum" and is_constant and not _is_rounded(x, call):
        request.check_leaves(x, call)
        # A constant is summed without communication; psum(1, axis) is the idiom for
        # the axis size and stays a Python number.
        return Request.ready(
            ALL_REDUCE, call, lax.psum(x, axes, axis_index_groups=groups)
        )
    if call.index_groups is None and compat.checks_varying_axes():
        call = call.replace(to="invarying")
    x = request.as_arrays(x, call)
    if op in ("sum", "mean"):
        call = request.summed(x, call)
    return Request(ALL_REDUCE, x, call, op=op)


class AllReduce(Collective):
    """Every rank gets the reduction of all operands. Parameter: op."""

    name = "all_reduce"
    replicated = True

    def emulate(self, x, i, *, op):
        return jnp.broadcast_to(reduce_stacked(x, op, keepdims=True), x.shape)

    def fold(self, stacked, *, op):
        is_exact = op in ("max", "min")
        return [reduce_stacked(x if is_exact else widen(x), op) for x in stacked]

    def xla(self, xs, call, *, op):
        native = {
            "sum": lax.psum,
            "max": lax.pmax,
            "min": lax.pmin,
            "mean": lax.pmean,
        }.get(op)
        by_gathering = super().xla

        def reduce(x):
            unordered = jnp.issubdtype(x.dtype, jnp.complexfloating) and op != "sum"
            if native is None or unordered:
                return by_gathering([x], call, op=op)[0]
            total = native(widen(x), call.axes, axis_index_groups=call.index_groups)
            return total.astype(x.dtype)

        return [reduce(x) for x in xs]

    def jvp(self, primals, tangents, *, op, **params):
        if op in ("sum", "mean"):
            return super().jvp(primals, tangents, op=op, **params)
        if op == "prod":
            return gathered_jvp(self, primals, tangents, op=op, **params)
        outs = self.primitive.bind(*primals, op=op, **params)
        is_extreme = [
            (x == out).astype(t.dtype)
            for x, out, t in zip(primals, outs, tangents, strict=True)
        ]
        # Two calls: the counts are constants to the tangents, and stay so under
        # transposition.
        counts = self.primitive.bind(*is_extreme, op="sum", **params)
        shares = (t * hit for t, hit in zip(tangents, is_extreme, strict=True))
        totals = self.primitive.bind(*shares, op="sum", **params)
        return outs, [total / n for total, n in zip(totals, counts, strict=True)]


def gathered_jvp(collective, primals, tangents, *, call, **own):
    """Differentiate a collective through its emulation on gathered operands."""
    outs = collective.primitive.bind(*primals, call=call, **own)
    # Integers have no tangents: what stands in their places is not read.
    which = [i for i, x in enumerate(primals) if compat.has_tangent(x)]
    primals, tangents = ([xs[i] for i in which] for xs in (primals, tangents))
    count = len(which)

    def compute(stacked):
        def emulate(*stacked):
            return emulate_groups(
                collective, stacked, call.axes_size, call.index_groups, **own
            )

        _, rows = jax.jvp(emulate, tuple(stacked[:count]), tuple(stacked[count:]))
        return rows

    def gather(xs):
        # Two calls: the tangents must stay linear.
        return [*all_gather(xs[:count], call), *all_gather(xs[count:], call)]

    rows = gathered(compute, gather, [*primals, *tangents], call.axes)
    if call.invariant:
        # The same on every rank; said so by a sum to which rank 0 alone contributes.
        rank = jax.lax.axis_index(call.axes)
        rows = [jnp.where(rank == 0, row, 0).astype(row.dtype) for row in rows]
        options = {"lane": call.lane, "backend": call.backend}
        rows = reduction("psum", "sum", rows, call.axes, **options).run()
    out_tangents = list(outs)
    for i, row in zip(which, rows, strict=True):
        out_tangents[i] = row
    return outs, out_tangents


ALL_REDUCE = AllReduce()
define(ALL_REDUCE)
