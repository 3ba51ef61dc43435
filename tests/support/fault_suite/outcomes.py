"""What became of a result: right, raised, poisoned, WRONG, hung or exited."""

import numpy as np

RIGHT = "right"
RAISED = "raised"
POISONED = "poisoned"
WRONG = "WRONG"
HUNG = "hung"
EXITED = "exited"


def judge(found: np.ndarray, expected: np.ndarray) -> tuple[str, str]:
    """Compare every number of a result.

    Returns:
      RIGHT, POISONED (all NaN, or for integers all bits one) or WRONG; and in words
      what is wrong.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return WRONG, (
            f"{found.dtype}{found.shape} in place of {expected.dtype}{expected.shape}"
        )
    if np.array_equal(found, expected):
        return RIGHT, ""
    if np.issubdtype(found.dtype, np.inexact):
        poison = np.isnan(found)
        if np.iscomplexobj(found):
            poison = np.isnan(found.real) & np.isnan(found.imag)
    else:
        poison = found.view(np.uint8).reshape(*found.shape, -1).min(-1) == 0xFF
    if poison.all():
        return POISONED, ""
    wrong = found != expected
    first = np.unravel_index(np.flatnonzero(wrong)[0], wrong.shape)
    return WRONG, (
        f"{wrong.sum()} of {wrong.size} numbers differ, {poison.sum()} are poison; the "
        f"first is {found[first]} in place of {expected[first]}"
    )
