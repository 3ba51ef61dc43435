"""How the results of a collective are typed over mesh axes; as in jax.lax."""

from collections.abc import Sequence

from jaxcomm import compat
from jaxcomm.primitives.call import Call


def typed(avals: Sequence, outs: Sequence, call: Call) -> list:
    """Return the results' types, over the axes of ``call`` and over all others.

    Args:
      avals: the operands' types.
      outs: the results' types so far, as many as operands or fewer.
      call: says how operands and results are typed over its axes.

    Raises:
      ValueError: if an operand has a type that ``call`` does not take.
    """
    axes = frozenset(call.axes)
    for aval in avals:
        _check(aval, call)
    varying = frozenset().union(*(aval.mat.varying for aval in avals))
    found = []
    for i, out in enumerate(outs):
        mine = avals[i].mat.varying if len(outs) == len(avals) else varying
        changes = {"varying": mine - axes if call.to != "varying" else mine}
        if call.given == "unreduced":
            changes["unreduced"] = out.mat.unreduced - axes
            if call.to == "varying":
                changes["varying"] |= axes
        if call.to == "reduced":
            changes["reduced"] = out.mat.reduced | axes
        found.append(compat.with_manual_axes(out, **changes))
    return found


def _check(aval, call: Call) -> None:
    axes = frozenset(call.axes)
    if call.given == "unreduced":
        if not axes <= aval.mat.unreduced:
            raise ValueError(
                f"{call}: the operand must be unreduced over all of these axes, got "
                f"{aval.str_short(True)}"
            )
        return
    both = (aval.mat.unreduced | aval.mat.reduced) & axes
    if both:
        raise ValueError(
            f"{call}: the operand is unreduced or reduced over {tuple(sorted(both))}, "
            f"got {aval.str_short(True)}. Sum unreduced operands by jaxcomm.psum or "
            f"jaxcomm.psum_scatter; type reduced ones as varying by jaxcomm.pcast."
        )
