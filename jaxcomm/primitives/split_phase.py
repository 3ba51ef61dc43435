"""How a collective is bound in two halves: ``start`` begins it, ``done`` ends it.

``start`` takes the operands and gives (held, arriving): the operands again, and the
results, which are not to be looked at yet. ``done`` takes both, and any arrays it is to
wait for, and gives the results. So every buffer lives exactly until ``done``, ``done``
needs its ``start``, and ``start`` serves nothing but its ``done``: a program holds both
or neither.

The transpose of a pair is a pair. Of ``done``: the start of the transpose, with
(arriving, held) as cotangents of (held, arriving). Of ``start``: its done.

Beside those of the collective both primitives have the parameter ``paired``: both
halves are in one program. If not, ``start`` does everything.
"""

from jaxcomm import compat
from jaxcomm.primitives import define as _primitive
from jaxcomm.primitives import lowering
from jaxcomm.primitives.batching import moved_to_front
from jaxcomm.primitives.collective import Collective


def define(collective: Collective) -> None:
    """Makes the two primitives of a collective and registers their rules."""
    pair = _Pair(collective)
    collective.pair = pair
    _register(
        pair.start, pair.start_abstract, pair.start_jvp, pair.start_transpose,
        pair.start_batch,
    )  # fmt: skip
    _register(
        pair.done, pair.done_abstract, pair.done_jvp, pair.done_transpose,
        pair.done_batch,
    )  # fmt: skip
    lowering.register_pair(collective)


def _register(primitive, abstract_eval, jvp, transpose, batch):
    for each in (primitive, primitive.portable):
        each.def_impl(_primitive.refuse_unbound)
        each.def_effectful_abstract_eval(abstract_eval)
        compat.ad.primitive_jvps[each] = jvp
        compat.ad.primitive_transposes[each] = transpose
        compat.batching.fancy_primitive_batchers[each] = batch


class _Pair:
    """The halves of one collective.

    Attributes:
      start: takes operands; gives as many held, then the results. Held is the operands.
      done: takes held, results, and what to wait for; gives the results. Its parameter
        ``leaves`` is the number of operands.
    """

    def __init__(self, collective):
        self.collective = collective
        name = f"jaxcomm_{collective.name}"
        self.start = _primitive.CollectivePrimitive(f"{name}_start")
        self.done = _primitive.CollectivePrimitive(f"{name}_done")

    def start_abstract(self, *avals, paired, **params):
        arriving, effects = _primitive.abstract_eval_of(
            self.collective, avals, **params
        )
        return [*avals, *arriving], effects

    def done_abstract(self, *avals, leaves, axes, **_):
        return list(avals[leaves : 2 * leaves]), compat.named_axis_effects(axes)

    def start_jvp(self, primals, tangents, **params):
        outs = self.start.bind(*primals, **params)
        out_tangents = [compat.zero_tangent(out) for out in outs]
        # Integers have none. If one leaf has a tangent, those of all the rest travel.
        which = [i for i, x in enumerate(primals) if compat.has_tangent(x)]
        if any(not compat.is_zero_tangent(tangents[i]) for i in which):
            moving = [compat.ad.instantiate_zeros(tangents[i]) for i in which]
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
        cts = [compat.ad.instantiate_zeros(ct) for ct in cts]
        held, arriving = cts[: len(operands)], cts[len(operands) :]
        dual = self.collective.dual(**params)
        if dual is None:
            return held
        collective, params = dual
        return collective.pair.done.bind(
            *arriving, *held, leaves=len(held), paired=paired, **params
        )

    def done_transpose(self, cts, *operands, leaves, paired, **params):
        cts = [compat.ad.instantiate_zeros(ct) for ct in cts]
        dual = self.collective.dual(**params)
        if dual is None:
            # Nothing to overlap: what start's transpose is to give goes there as it is.
            arriving, held = cts, self.collective.transpose(cts, **params)
        else:
            collective, params = dual
            outs = collective.pair.start.bind(*cts, paired=paired, **params)
            arriving, held = outs[:leaves], outs[leaves:]
        return [*held, *arriving, *map(_no_cotangent, operands[2 * leaves :])]

    def start_batch(self, axis_data, operands, dims, *, paired, **params):
        if axis_data.name in params["axes"]:
            outs, out_dims = self.collective.batch(axis_data, operands, dims, **params)
            return [*operands, *outs], [*dims, *out_dims]
        operands, params = moved_to_front(self.collective, operands, dims, params)
        outs = self.start.bind(*operands, paired=paired, **params)
        return outs, [None if d is None else 0 for d in dims] * 2

    def done_batch(self, axis_data, operands, dims, *, leaves, **params):
        arriving, after = operands[leaves : 2 * leaves], operands[2 * leaves :]
        if axis_data.name in params["axes"]:
            return arriving, dims[leaves : 2 * leaves]
        held, params = moved_to_front(
            self.collective, operands[:leaves], dims[:leaves], params
        )
        outs = self.done.bind(*held, *arriving, *after, leaves=leaves, **params)
        return outs, dims[leaves : 2 * leaves]

    def _of_leaves(self, params, which):
        """Returns the parameters of some of the leaves alone."""
        own = {
            name: tuple(params[name][i] for i in which)
            for name in self.collective.dimension_params
        }
        return params | own


def _no_cotangent(operand):
    if not compat.ad.is_undefined_primal(operand):
        return None
    return compat.ad.Zero(operand.aval)
