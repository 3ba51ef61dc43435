"""Check the values that users hand to a collective, beside its operands."""

from collections.abc import Mapping

import numpy as np

from jaxcomm.errors import OutOfRangeError
from jaxcomm.primitives.call import Call, as_index


def root(value, call: Call, what: str = "root") -> int:
    """Return a root, called ``what``, checked to be an index along the axes."""
    index, size = integer(value, f"{call.where}: {what}"), call.axes_size
    if not 0 <= index < size:
        raise ValueError(
            f"{call.where}: {what} {index} is not among the {size} indices "
            f"0 .. {size - 1}"
        )
    return index


def integer(value, what: str) -> int:
    """Return the integer, or raises TypeError, which calls it ``what``."""
    try:
        return as_index(value)
    except TypeError:
        raise TypeError(
            f"{what} must be an integer known when the program is traced, got {value!r}"
        ) from None


def flag(value, what: str) -> bool:
    """Return True or False, or raises TypeError, which calls it ``what``.

    jax.lax takes whatever is true or false, the text "False" too.
    """
    if isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(
        f"{what} must be True or False, known when the program is traced, got {value!r}"
    )


def indices(perm, call: Call) -> list[int]:
    """Return what ``pshuffle`` takes."""
    try:
        return [as_index(index) for index in perm]
    except TypeError:
        raise TypeError(
            f"{call.where}: perm must be a sequence of integers known when the "
            f"program is traced, the source of each index along the axis, got "
            f"{perm!r}. Pairs (source, destination) go to jaxcomm.ppermute."
        ) from None


def index_pairs(perm, call: Call) -> tuple[tuple[int, int], ...]:
    """Return what ``ppermute`` takes."""
    wrong = (
        f"{call.where}: perm must be pairs (source, destination) of integers "
        f"known when the program is traced, got {perm!r}"
    )
    if isinstance(perm, Mapping):
        raise TypeError(f"{wrong}. Pass list(perm.items()).")
    try:
        entries = list(perm)
        if any(isinstance(entry, (int, np.integer)) for entry in entries):
            wrong += ". The source of each index by itself is jaxcomm.pshuffle's form."
        pairs = [[as_index(index) for index in entry] for entry in entries]
    except TypeError:
        raise TypeError(wrong) from None
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(wrong)
    return tuple((source, target) for source, target in pairs)


def canonical_dimension(dimension: int, ndim: int, name: str, what: str) -> int:
    """Return a dimension counted from the front."""
    dimension = integer(dimension, f"{name}: {what}")
    if not -ndim <= dimension < ndim:
        raise OutOfRangeError(
            f"{name}: {what} {dimension} is out of range for an array of {ndim} "
            f"dimensions"
        )
    return dimension % ndim


def split_dimension(
    dimension: int, shape: tuple[int, ...], tiled: bool, call: Call, what: str
) -> int:
    """Return a dimension that is cut for the ranks, counted from the front."""
    name, size = call.name, call.group_size
    d = canonical_dimension(dimension, len(shape), name, what)
    if tiled and shape[d] % size != 0:
        raise ValueError(
            f"{name}: dimension {d} of x has size {shape[d]}, not divisible by the "
            f"{size} devices of axes {call.axes}. Pad x or choose another {what}."
        )
    if not tiled and shape[d] != size:
        raise ValueError(
            f"{name}: dimension {d} of x has size {shape[d]}, but axes {call.axes} "
            f"have {size} devices. They must be equal, or pass tiled=True"
            f"{' to all_to_all' if name == 'pswapaxes' else ''}."
        )
    return d
