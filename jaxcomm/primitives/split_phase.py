"""Split-phase collectives: ``start`` begins one, ``done`` ends it.

``start`` takes the operands and returns (held, arriving): the operands again, and the
results, which nothing may read yet. ``done`` takes both, and any arrays to wait for,
and returns the results. So every buffer lives exactly until ``done``. ``done`` needs
its ``start``, and nothing else uses ``start``: a program holds both or neither.

The transpose of a pair is a pair. The transpose of ``done`` is the start of the
transposed collective, with (arriving, held) as cotangents of (held, arriving). The
transpose of ``start`` is its done.

Both primitives have the collective's parameters, and ``paired``: both are in one
program. If not, ``start`` does everything.
"""

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jaxcomm import compat
from jaxcomm.primitives import lowering
from jaxcomm.primitives.batching import moved_to_front
from jaxcomm.primitives.call import check_array
from jaxcomm.primitives.collective import (
    Bound,
    Collective,
    CollectivePrimitive,
    abstract_eval_of,
    register,
)

# An optimization barrier whose results are as replicated as its operands. In jax 0.10
# those of jax.lax.optimization_barrier vary over all axes over which any operand does.
# Not "jaxcomm_barrier", which is the collective.
barrier_p = jax.extend.core.Primitive("jaxcomm_optimization_barrier")
barrier_p.multiple_results = True


def barrier(xs):
    """Return the pytree ``xs``; each of its arrays is available once all are."""
    leaves, tree = jax.tree.flatten(xs)
    return jax.tree.unflatten(tree, barrier_p.bind(*leaves))


def _barrier_jvp(primals, tangents):
    outs = barrier_p.bind(*primals)
    moving = [i for i, t in enumerate(tangents) if not compat.is_zero_tangent(t)]
    out_tangents = list(map(compat.zero_tangent, outs))
    if moving:
        moved = barrier_p.bind(*(tangents[i] for i in moving))
        for i, tangent in zip(moving, moved, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _barrier_transpose(cts, *operands):
    known = [i for i, ct in enumerate(cts) if not compat.is_zero_tangent(ct)]
    outs = list(cts)
    if known:
        moved = barrier_p.bind(*(cts[i] for i in known))
        for i, ct in zip(known, moved, strict=True):
            outs[i] = ct
    return outs


def _barrier_lower(ctx, *operands):
    return compat.lower_as(lambda *xs: jax.lax.optimization_barrier(xs), ctx, *operands)


barrier_p.def_impl(jax.jit(barrier_p.bind))
barrier_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[barrier_p] = _barrier_jvp
ad.primitive_transposes[barrier_p] = _barrier_transpose
batching.primitive_batchers[barrier_p] = lambda operands, dims: (
    barrier_p.bind(*operands),
    dims,
)
compat.register_lowering(barrier_p, _barrier_lower)


class Handle:
    """A collective that a ``*_start`` function began, to be finished by ``done``.

    Call ``done`` once, in the same traced function. A handle cannot be returned,
    carried by a loop or passed to a transformed function, and holds nothing to compute
    with.
    """

    def __init__(
        self,
        text: str,
        travelling: Any,
        finish: Callable[[Any, list[Any]], Any],
    ):
        """Keep ``finish(travelling, waits_for)``, which binds the other primitive."""
        self._text = text
        self._travelling = travelling
        self._finish = finish
        # Weakly: a handle that is forgotten must not keep a trace alive.
        self._trace = weakref.ref(compat.current_trace())
        self._open = True
        # Whether an error said already that it is to be finished.
        self._told = False

    def __repr__(self) -> str:
        """Say which call it is of, and whether it is finished."""
        state = "to finish by its done()" if self._open else "finished"
        return f"<{self._text}, {state}>"

    def __getattr__(self, name: str) -> NoReturn:
        """Say ``done`` to those who call it as other libraries do."""
        if name in ("wait", "result", "synchronize", "get_future", "is_completed"):
            raise AttributeError(
                f"{self._text} has no {name}: its done() finishes it and returns the "
                "results. XLA says when that is, so there is nothing to ask meanwhile.",
                name=name,
            )
        raise AttributeError(f"'Handle' object has no attribute {name!r}", name=name)

    @property
    def _is_under_way(self) -> bool:
        """Whether it was begun in the function being traced, and is not finished."""
        return self._open and self._trace() is compat.current_trace()

    def done(self, *, after: Any = None) -> Any:
        """Finish the collective and return its results.

        Args:
          after: a pytree of arrays to wait for, usually the results of what is computed
            meanwhile. They are not read. If None, nothing more.

        Returns:
          What the function without ``_start`` would have returned.

        Raises:
          TypeError: if a leaf of ``after`` is no array.
          ValueError: if it was finished before, or started in another traced function.

        Example:
          >>> def swap(x):
          ...     handle = jaxcomm.ppermute_start(x, "i", [(0, 1), (1, 0)])
          ...     out = jnp.sin(handle.then(x))
          ...     return handle.done(after=out) + out
          >>> f = jax.shard_map(swap, in_specs=jax.P("i"), out_specs=jax.P("i"))
          >>> jax.jit(f)(jnp.zeros(4)).shape
          (4,)
        """
        if not self._open:
            raise ValueError(
                f"done: {self._text} was finished before; a handle is good for one done"
            )
        self._told = True
        if self._trace() is not compat.current_trace():
            raise ValueError(
                f"done: {self._text} was called in another traced function. Start "
                f"and finish it in one body of jit, scan, while_loop, cond, grad, vmap "
                f"or checkpoint."
            )
        waits_for = [_awaited(leaf, self._text) for leaf in jax.tree.leaves(after)]
        self._open = False
        finish, travelling = self._finish, self._travelling
        del self._finish, self._travelling  # and what they hold
        return finish(travelling, waits_for)

    def then(self, x: Any) -> Any:
        """Return ``x`` for computations that must come after the start.

        XLA chooses the order in which a GPU runs a program: it may compute first and
        start last. Computations on the result of ``then`` cannot come first. On other
        devices ``then`` changes nothing.

        Args:
          x: a pytree of arrays.

        Returns:
          A pytree like ``x``, of the same values.

        Raises:
          TypeError: if a leaf of ``x`` is no array.
          ValueError: if the handle was finished, or is of another traced function.
        """
        if not self._is_under_way:
            raise ValueError(
                f"then: {self._text} was finished, or started in another traced "
                f"function; call it between the start and done"
            )
        leaves, tree = jax.tree.flatten(x)
        for leaf in leaves:
            check_array(leaf, f"then: {self._text}: every leaf of x")
        if not self._travelling or not leaves:
            return x
        self._travelling, leaves = barrier((tuple(self._travelling), tuple(leaves)))
        return jax.tree.unflatten(tree, leaves)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``: both could be finished."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Refuse: whoever flattens a handle is about to take it elsewhere.

        A node of a pytree, so that the error says what to do: JAX would refuse a leaf
        by its type alone. The handle stays as it is.
        """
        self._told = True
        raise ValueError(
            f"the handle of {self._text} must stay in the function that called it: "
            f"call its done() there, and return, carry or pass on what that gives"
        )

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn of a start without a done, as Python does of a forgotten coroutine.

        Not while Python ends: it has no modules then that could warn.
        """
        if getattr(self, "_open", False) and not self._told and not _ends():
            warnings.warn(
                f"{self._text} was never finished, so nothing is sent; call its done()",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


# No handle is ever flattened, and so none is made of leaves.
jax.tree_util.register_pytree_node(
    Handle,
    Handle._refuse,
    lambda *_: None,  # pyright: ignore[reportArgumentType]
)


def _awaited(leaf, text: str):
    check_array(leaf, f"done: {text}: every leaf of after")
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf


def define_pair(collective: Collective) -> None:
    """Make the two primitives of a collective and register their rules."""
    pair = _Pair(collective)
    collective.pair = pair
    register(
        pair.start,
        pair.start_abstract,
        pair.start_jvp,
        pair.start_transpose,
        pair.start_batch,
    )
    register(
        pair.done,
        pair.done_abstract,
        pair.done_jvp,
        pair.done_transpose,
        pair.done_batch,
    )
    lowering.register_pair(collective)


class _Pair:
    """The two primitives of one collective.

    Attributes:
      start: takes operands; returns as many held, then the results. Held is the
        operands.
      done: takes held, results, and what to wait for; returns the results. Its
        parameter ``leaves`` is the number of operands.
    """

    def __init__(self, collective):
        self.collective = collective
        name = f"jaxcomm_{collective.name}"
        self.start = CollectivePrimitive(f"{name}_start")
        self.done = CollectivePrimitive(f"{name}_done")

    def start_abstract(self, *avals, paired, **params):
        arriving, effects = abstract_eval_of(self.collective, avals, **params)
        return [*avals, *arriving], effects

    def done_abstract(self, *avals, leaves, call, **_):
        return list(avals[leaves : 2 * leaves]), compat.named_axis_effects(call.axes)

    def start_jvp(self, primals, tangents, **params):
        outs = self.start.bind(*primals, **params)
        out_tangents = [compat.zero_tangent(out) for out in outs]
        # Integers have none. If one leaf has a tangent, those of all the rest travel.
        which = [i for i, x in enumerate(primals) if compat.has_tangent(x)]
        if any(not compat.is_zero_tangent(tangents[i]) for i in which):
            moving = [ad.instantiate_zeros(tangents[i]) for i in which]
            moved = self.start.bind(*moving, **self._of_leaves(params, which))
            for k, i in enumerate(which):
                out_tangents[i] = moved[k]
                out_tangents[len(primals) + i] = moved[len(which) + k]
        return outs, out_tangents

    def done_jvp(self, primals, tangents, *, leaves, **params):
        outs = self.done.bind(*primals, leaves=leaves, **params)
        out_tangents = [compat.zero_tangent(out) for out in outs]
        which = [
            i for i in range(leaves) if not compat.is_zero_tangent(tangents[leaves + i])
        ]
        if which:
            moved = self.done.bind(
                *(tangents[i] for i in which),
                *(tangents[leaves + i] for i in which),
                *(t for t in tangents[2 * leaves :] if not compat.is_zero_tangent(t)),
                leaves=len(which),
                **self._of_leaves(params, which),
            )
            for i, tangent in zip(which, moved, strict=True):
                out_tangents[i] = tangent
        return outs, out_tangents

    def start_transpose(self, cts, *operands, paired, **params):
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        held, arriving = cts[: len(operands)], cts[len(operands) :]
        transposed = self.collective.transposed(**params)
        if not isinstance(transposed, Bound):
            return held
        return transposed.collective.pair.done.bind(
            *arriving, *held, leaves=len(held), paired=paired, **transposed.params
        )

    def done_transpose(self, cts, *operands, leaves, paired, **params):
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        transposed = self.collective.transposed(**params)
        if isinstance(transposed, Bound):
            start = transposed.collective.pair.start
            outs = start.bind(*cts, paired=paired, **transposed.params)
            arriving, held = outs[:leaves], outs[leaves:]
        else:
            # Nothing to overlap: start's transpose returns what arrives there.
            arriving, held = cts, transposed(cts, ())
        return [*held, *arriving, *map(_no_cotangent, operands[2 * leaves :])]

    def start_batch(self, axis_data, operands, dims, *, paired, **params):
        if axis_data.name in params["call"].axes:
            outs, out_dims = self.collective.batch(axis_data, operands, dims, **params)
            return [*operands, *outs], [*dims, *out_dims]
        operands, params = moved_to_front(self.collective, operands, dims, params)
        outs = self.start.bind(*operands, paired=paired, **params)
        return outs, [None if d is None else 0 for d in dims] * 2

    def done_batch(self, axis_data, operands, dims, *, leaves, **params):
        arriving, after = operands[leaves : 2 * leaves], operands[2 * leaves :]
        if axis_data.name in params["call"].axes:
            return arriving, dims[leaves : 2 * leaves]
        held, params = moved_to_front(
            self.collective, operands[:leaves], dims[:leaves], params
        )
        outs = self.done.bind(*held, *arriving, *after, leaves=leaves, **params)
        return outs, dims[leaves : 2 * leaves]

    def _of_leaves(self, params, which) -> dict[str, Any]:
        """Return the parameters of some of the leaves alone."""
        own = {
            name: tuple(params[name][i] for i in which)
            for name in self.collective.dimension_params
        }
        return params | own


def _no_cotangent(operand):
    if not ad.is_undefined_primal(operand):
        return None
    return ad.Zero(operand.aval)
