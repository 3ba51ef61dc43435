"""All-reduce: psum, pmean, pmax, pmin, pprod."""

import math

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define

REDUCERS = {"sum": jnp.sum, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}


def psum(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Sums ``x`` over the devices of a mesh axis; a twin of ``jax.lax.psum``.

    bfloat16, float16 and float8 accumulate in float32; bool counts in int32. Every
    device gets the same bits: ranks are added in rank order, where NCCL does not add,
    which chooses its own.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names to sum over jointly. Integers
        among them name dimensions of ``x`` to sum over as well.
      axis_index_groups: groups of indices to sum within instead. If None, all.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree like ``x``, typed as equal on all devices of the axis (unless there
      are ``axis_index_groups``).

    Raises:
      NameError: if the axis is not bound by ``jax.shard_map`` or ``jax.vmap``.
      ValueError: if ``axis_index_groups`` do not hold every index once.

    Example:
      On a mesh of 4 devices along ``"i"``:

      >>> jax.shard_map(lambda x: jaxcomm.psum(x, "i"), in_specs=jax.P("i"),
      ...               out_specs=jax.P())(jnp.arange(4.))  # doctest: +SKIP
      Array([6.], dtype=float32)
    """
    x = define.count_bools(x)
    return reduce_all("psum", "sum", x, axis_name, axis_index_groups, lane, backend)


def pmean(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Averages ``x`` over the devices of a mesh axis; a twin of ``jax.lax.pmean``.

    Arguments, result and errors are those of :func:`psum`; integers give floats. NCCL
    multiplies float32 and float64 by one over the number of ranks before it adds them:
    where that is no power of two, last bits differ from those of a sum that is divided.

    Example:
      >>> # x is [0.], [1.], [2.], [3.] on the 4 devices of "i"
      >>> jaxcomm.pmean(x, "i")  # doctest: +SKIP
      Array([1.5], dtype=float32)
    """
    x = define.count_bools(x)
    if axis_index_groups is None and _is_averaged(x, axis_name):
        return reduce_all("pmean", "mean", x, axis_name, None, lane, backend)
    total = reduce_all("pmean", "sum", x, axis_name, axis_index_groups, lane, backend)
    count = jax.lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda leaf: leaf / count, total)


def pmax(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Takes the maximum over a mesh axis; a twin of ``jax.lax.pmax``.

    On the host backend NaN wins over numbers; with ``backend="xla"`` and on NCCL it is
    treated as XLA and NCCL treat it. Complex numbers compare lexicographically.
    Arguments, result and errors are those of :func:`psum`. Differentiable, which
    jax.lax's is not: the gradient goes to the devices that hold the maximum, in equal
    parts.

    Example:
      >>> # x is [0.], [1.], [2.], [3.] on the 4 devices of "i"
      >>> jaxcomm.pmax(x, "i")  # doctest: +SKIP
      Array([3.], dtype=float32)
    """
    return reduce_all("pmax", "max", x, axis_name, axis_index_groups, lane, backend)


def pmin(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Takes the minimum over a mesh axis; a twin of ``jax.lax.pmin``.

    See :func:`pmax`, also for what becomes of NaN.

    Example:
      >>> # x is [0.], [1.], [2.], [3.] on the 4 devices of "i"
      >>> jaxcomm.pmin(x, "i")  # doctest: +SKIP
      Array([0.], dtype=float32)
    """
    return reduce_all("pmin", "min", x, axis_name, axis_index_groups, lane, backend)


def pprod(x, axis_name, *, axis_index_groups=None, lane=None, backend=None):
    """Multiplies ``x`` over the devices of a mesh axis; jax.lax has no such function.

    Arguments, result and errors are those of :func:`psum`; bool counts in int32.
    Differentiable, also where factors are zero; the gradient gathers ``x``.

    Example:
      >>> # x is [1.], [2.], [3.], [4.] on the 4 devices of "i"
      >>> jaxcomm.pprod(x, "i")  # doctest: +SKIP
      Array([24.], dtype=float32)
    """
    x = define.count_bools(x)
    return reduce_all("pprod", "prod", x, axis_name, axis_index_groups, lane, backend)


def _is_averaged(x, axis_name):
    """Says whether averaging is an operation of its own: NCCL has it."""
    axes = replica_groups.canonical_axes(axis_name)
    leaves = jax.tree.leaves(x)
    return not any(isinstance(axis, int) for axis in axes) and all(
        compat.is_tracer(leaf) and leaf.dtype in (jnp.float32, jnp.float64)
        for leaf in leaves
    )


def reduce_all(
    name: str, op, x, axis_name, axis_index_groups, lane, backend, bind=define.bind
):
    """Checks an all-reduce and hands it to ``bind``, for the function ``name``."""
    given = replica_groups.canonical_axes(axis_name)
    if any(isinstance(axis, bool) for axis in given):
        raise TypeError(f"{name}: an axis is a name or an integer, got {given}")
    axes = tuple(axis for axis in given if not isinstance(axis, int))
    positional = tuple(axis for axis in given if isinstance(axis, int))
    if positional and axis_index_groups is not None:
        raise ValueError(
            f"{name}: axis_index_groups go with axis names alone, got axes {given}"
        )
    if positional:
        x = jax.tree.map(lambda leaf: REDUCERS[op](leaf, axis=positional), x)
    if not axes:
        return x
    compat.check_axes_bound(axes, name)
    define.check_leaves(x, axes, name)
    index_groups = define.index_groups_of(axes, axis_index_groups, name)
    leaves = jax.tree.leaves(x)
    if op == "sum" and not any(compat.is_tracer(leaf) for leaf in leaves):
        # A constant is summed without communication; psum(1, axis) is the idiom for
        # the axis size and stays a Python number.
        return jax.lax.psum(x, axes, axis_index_groups=axis_index_groups)
    return bind(
        all_reduce, x, axes, name=name, index_groups=index_groups,
        invariant=compat.checks_varying_axes() and index_groups is None,
        lane=lane, backend=backend, op=op,
    )  # fmt: skip


class AllReduce(define.Collective):
    """Every rank gets the reduction of all operands. Parameter: op."""

    name = "all_reduce"
    replicated = True

    def emulate(self, x, i, *, op):
        return jnp.broadcast_to(reduce_stacked(x, op, keepdims=True), x.shape)

    def fold(self, stacked, *, op):
        return [reduce_stacked(x, op) for x in stacked]

    def xla(self, xs, axes, index_groups, *, op):
        native = {
            "sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin,
            "mean": jax.lax.pmean,
        }.get(op)  # fmt: skip

        def reduce(x):
            unordered = jnp.issubdtype(x.dtype, jnp.complexfloating) and op != "sum"
            if native is None or unordered:
                return super(AllReduce, self).xla([x], axes, index_groups, op=op)[0]
            total = native(widen(x), axes, axis_index_groups=index_groups)
            return total.astype(x.dtype)

        return [reduce(x) for x in xs]

    def without_mean(self, size, *, op, **params):
        if op != "mean":
            return None

        def divide(bind, *xs):
            totals = bind(self.primitive, xs, op="sum", **params)
            return [total / size for total in totals]

        return divide

    def dual(self, **params):
        # Equal results: each rank's operand counts once in the one result. Without
        # that type every rank's result counts by itself, and they are summed.
        return None if params["invariant"] else (self, params)

    def transpose(self, cts, **params):
        from jaxcomm.collectives.pvary import pvary

        if not params["invariant"]:
            return super().transpose(cts, **params)
        lane, backend = params["lane"], params["backend"]
        if params["op"] == "mean":
            size = define.group_size(params["axes"])
            cts = [ct / size for ct in cts]
        return pvary(cts, params["axes"], lane=lane, backend=backend)

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


def widen(x):
    """Returns ``x`` in the type its reduction accumulates in."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16) or x.dtype.name.startswith("float8")
    return x.astype(jnp.float32) if narrow else x


def reduce_stacked(x, op, keepdims=False):
    """Reduces over axis 0 as the collective does: accumulated wide, dtype kept."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and op in ("max", "min"):
        return _lexicographic(x, op, keepdims)
    if x.dtype == jnp.bool_:
        # max and min of bools; sums and products were turned into int32's before.
        return REDUCERS[op](x.astype(jnp.int8), axis=0, keepdims=keepdims).astype(bool)
    reducer = jnp.mean if op == "mean" else REDUCERS[op]
    return reducer(widen(x), axis=0, keepdims=keepdims).astype(x.dtype)


def _lexicographic(x, op, keepdims):
    pick = jax.lax.max if op == "max" else jax.lax.min
    out = x[0]
    for other in x[1:]:
        # XLA's takes a NaN for a number that is not the one looked for.
        picked = jnp.where(jnp.isnan(other), other, pick(out, other))
        out = jnp.where(jnp.isnan(out), out, picked)
    return out[None] if keepdims else out


def gathered_jvp(collective, primals, tangents, *, axes, index_groups, invariant, name,
                 lane, backend, **own):  # fmt: skip
    """Differentiates a collective through its emulation on gathered operands."""
    from jaxcomm.collectives.all_gather import all_gather

    def gather(x):
        return all_gather(x, axes, lane=lane, backend=backend)

    outs = collective.primitive.bind(
        *primals, axes=axes, index_groups=index_groups, invariant=invariant, name=name,
        lane=lane, backend=backend, **own,
    )  # fmt: skip
    size = math.prod(compat.axis_size(axis) for axis in axes)

    def emulate(*stacked):
        return define.emulate_groups(collective, stacked, size, index_groups, **own)

    _, rows = jax.jvp(
        emulate, tuple(gather(list(primals))), tuple(gather(list(tangents)))
    )
    rank = jax.lax.axis_index(axes)
    if invariant:
        # The same on every rank; said so by a sum to which rank 0 alone contributes.
        rows = [jnp.where(rank == 0, row[0], 0).astype(row.dtype) for row in rows]
        return outs, psum(rows, axes, lane=lane, backend=backend)
    return outs, [jax.lax.dynamic_index_in_dim(row, rank, 0, False) for row in rows]


all_reduce = AllReduce()
all_reduce_p = define.define(all_reduce)
