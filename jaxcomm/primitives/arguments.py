"""What users hand to a collective, checked and made ready to travel."""

import math
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.lane import check_lane as check_lane

# Types with several elements to a byte travel as the next wider type, which holds
# every value of theirs.
_CARRIERS = {
    "int1": np.int8,
    "uint1": np.uint8,
    "int2": np.int8,
    "uint2": np.uint8,
    "int4": np.int8,
    "uint4": np.uint8,
    "float4_e2m1fn": ml_dtypes.bfloat16,
}


def prepare(
    leaves: Sequence,
    axes: tuple[str, ...],
    name: str,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> list[jax.Array]:
    """Makes arrays of the leaves, varying over the axes, or says what is wrong."""
    from jaxcomm.collectives.pvary import pvary  # its transpose is a collective

    arrays = as_arrays(list(leaves), axes, name)
    return pvary(arrays, axes, lane=lane, backend=backend) if arrays else arrays


def as_arrays(x, axes: tuple[str, ...], name: str):
    """Returns the pytree with arrays for leaves.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
    """
    compat.check_axes_bound(axes, name)
    check_leaves(x, axes, name)

    def as_array(leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name} over {axes}: x has dtype {leaf.dtype}; send "
                f"jax.random.key_data(x) and wrap what arrives in "
                f"jax.random.wrap_key_data"
            )
        if leaf.dtype.name.startswith("float6_"):
            raise TypeError(
                f"{name} over {axes}: x has dtype {leaf.dtype}, which XLA cannot hand "
                f"to a custom call; cast it first, to bfloat16 without loss"
            )
        return leaf

    return jax.tree.map(as_array, x)


def check_leaves(x, axes: tuple[str, ...], name: str) -> None:
    """Raises TypeError if a leaf of the pytree is neither an array nor a number."""
    for leaf in jax.tree.leaves(x):
        if not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)
        ):
            raise TypeError(
                f"{name} over {axes}: every leaf of x must be an array, got "
                f"{type(leaf).__name__}"
            )


def group_size(axes, index_groups=None) -> int:
    """Returns the number of devices of a group.

    Raises:
      ValueError: if ``axis_index_groups`` are malformed or of unequal sizes.
    """
    size = math.prod(compat.axis_size(axis) for axis in axes)
    if index_groups is None:
        return size
    sizes = {len(group) for group in index_groups}
    if len(sizes) > 1:
        raise ValueError(
            f"axis_index_groups must all be of one size here, got {index_groups}"
        )
    return sizes.pop()


def index_groups_of(axes, axis_index_groups, name: str):
    """Returns ``axis_index_groups`` checked against the axes they divide.

    Raises:
      TypeError: if they are not sequences of integers.
      ValueError: if they do not hold every index exactly once.
    """
    if axis_index_groups is None:
        return None
    try:
        groups = [[_index(index) for index in group] for group in axis_index_groups]
    except TypeError:
        raise TypeError(
            f"{name} over {axes}: axis_index_groups must be sequences of integers "
            f"known when the program is traced, such as [[0, 1], [2, 3]], got "
            f"{axis_index_groups!r}"
        ) from None
    size = math.prod(compat.axis_size(axis) for axis in axes)
    return replica_groups.canonical_index_groups(groups, size)


def integer(value, what: str) -> int:
    """Returns the integer, or raises TypeError, which calls it ``what``."""
    try:
        return _index(value)
    except TypeError:
        raise TypeError(
            f"{what} must be an integer known when the program is traced, got {value!r}"
        ) from None


def flag(value, what: str) -> bool:
    """Returns True or False, or raises TypeError, which calls it ``what``.

    jax.lax takes whatever is true or false, the text "False" too.
    """
    if isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(
        f"{what} must be True or False, known when the program is traced, got {value!r}"
    )


def indices(perm, axes, name: str) -> list[int]:
    """Returns what ``pshuffle`` takes.

    Raises:
      TypeError: if it is something else.
    """
    try:
        return [_index(index) for index in perm]
    except TypeError:
        raise TypeError(
            f"{name} over {axes}: perm must be a sequence of integers known when the "
            f"program is traced, the source of each index along the axis, got "
            f"{perm!r}. Pairs (source, destination) go to jaxcomm.ppermute."
        ) from None


def index_pairs(perm, axes, name: str) -> tuple[tuple[int, int], ...]:
    """Returns what ``ppermute`` takes.

    Raises:
      TypeError: if it is something else.
      ValueError: if an entry is not of length two.
    """
    wrong = (
        f"{name} over {axes}: perm must be pairs (source, destination) of integers "
        f"known when the program is traced, got {perm!r}"
    )
    if isinstance(perm, Mapping):
        raise TypeError(f"{wrong}. Pass list(perm.items()).")
    try:
        entries = list(perm)
        if any(isinstance(entry, (int, np.integer)) for entry in entries):
            wrong += ". The source of each index by itself is jaxcomm.pshuffle's form."
        pairs = [[_index(index) for index in entry] for entry in entries]
    except TypeError:
        raise TypeError(wrong) from None
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(wrong)
    return tuple((source, target) for source, target in pairs)


def _index(value) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def count_bools(x):
    """Returns the pytree with bools as int32, the type jax.lax counts them in."""

    def count(leaf):
        is_bool = getattr(leaf, "dtype", None) == jnp.bool_ or isinstance(leaf, bool)
        return jnp.asarray(leaf, jnp.int32) if is_bool else leaf

    return jax.tree.map(count, x)


def canonical_dimension(dimension: int, ndim: int, name: str, what: str) -> int:
    """Returns a dimension counted from the front.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if there is no such dimension.
    """
    dimension = integer(dimension, f"{name}: {what}")
    if not -ndim <= dimension < ndim:
        raise ValueError(
            f"{name}: {what} {dimension} is out of range for an array of {ndim} "
            f"dimensions"
        )
    return dimension % ndim


def has_carrier(dtype) -> bool:
    """Says whether arrays of this type travel as a wider one."""
    return dtype.name in _CARRIERS


def to_carrier(leaf):
    """Returns the array in the type it travels as."""
    carrier = _CARRIERS.get(leaf.dtype.name)
    return leaf if carrier is None else leaf.astype(carrier)
