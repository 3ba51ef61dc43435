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

from typing import Any

from jax.interpreters import ad

from jaxcomm import compat
from jaxcomm.primitives import lowering
from jaxcomm.primitives.batching import moved_to_front
from jaxcomm.primitives.collective import (
    Bound,
    Collective,
    CollectivePrimitive,
    abstract_eval_of,
    register,
)


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
