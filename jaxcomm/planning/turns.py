"""How often a ``while`` runs that counts from one known number to another.

``fori_loop`` becomes one where its bounds are no constants. A ring hides them from XLA
by an ``optimization_barrier``, which hands its operands on.
"""

from typing import Any

import jax.extend.core
import numpy as np

# Primitives whose results are their operands, in order.
_HAND_ON = {"optimization_barrier", "convert_element_type"}

# Variables whose values are known.
Known = dict[Any, int]


def remember(equation, known: Known) -> None:
    """Note what is known of the results of an equation."""
    if equation.primitive.name in _HAND_ON:
        for result, operand in zip(equation.outvars, equation.invars, strict=True):
            value = _value(operand, known)
            if value is not None:
                known[result] = value


def turns(equation, known: Known) -> int | None:
    """Return how often the body of a ``while`` runs, or None if that is not known."""
    condition = equation.params["cond_jaxpr"].jaxpr
    body = equation.params["body_jaxpr"].jaxpr
    before = equation.params["cond_nconsts"]
    skipped = before + equation.params["body_nconsts"]
    names = [eqn.primitive.name for eqn in condition.eqns]
    if names != ["lt"] or condition.outvars != condition.eqns[0].outvars:
        return None

    def first(variable, step: int) -> int | None:
        """Return the first value of a variable that each turn adds ``step`` to."""
        if variable not in condition.invars:
            return _value(variable, known) if step == 0 else None
        place = condition.invars.index(variable) - before
        if place < 0:  # A constant of the condition.
            return _value(equation.invars[place + before], known) if step == 0 else None
        old = body.invars[place + equation.params["body_nconsts"]]
        if _added(body, body.outvars[place], old) != step:
            return None
        return _value(equation.invars[place + skipped], known)

    counter, limit = condition.eqns[0].invars
    start, end = first(counter, 1), first(limit, 0)
    return None if start is None or end is None else max(0, end - start)


def _added(body, new, old) -> int | None:
    """Return the number that the body adds to a carry, or None."""
    if new is old:
        return 0
    for equation in body.eqns:
        if equation.primitive.name == "add" and equation.outvars[0] is new:
            carried, step = equation.invars
            return _value(step, {}) if carried is old else None
    return None


def _value(operand, known: Known) -> int | None:
    if not isinstance(operand, jax.extend.core.Literal):
        return known.get(operand)
    value: Any = operand.val
    dtype = np.asarray(value).dtype
    is_number = np.ndim(value) == 0 and np.issubdtype(dtype, np.integer)
    return int(value) if is_number else None
