"""Check what users hand to a collective. Nothing below checks it again."""

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxcomm import compat, config
from jaxcomm.communicator import cache, replica_groups
from jaxcomm.communicator.lane import check_lane
from jaxcomm.errors import OutOfRangeError
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.scope import current_scope

# A mesh axis, or several that number the ranks row-major.
AxisName = Hashable | Sequence[Hashable]
AxisIndexGroups = Sequence[Sequence[int]] | None
PyTree = Any

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


def call_of(
    name: str,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Call:
    """Check the arguments that all collectives share, for the function ``name``.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if groups are not sequences of integers.
      ValueError: if groups do not hold every index exactly once, or the lane is no
        name.
    """
    axes = replica_groups.canonical_axes(axis_name)
    compat.check_axes_bound(axes, name)
    if lane is not None:
        check_lane(lane, f"{name} over {axes}: lane")
    scope = current_scope()
    call = Call(
        name,
        axes,
        lane=scope.lane if lane is None else lane,
        backend=_backend(scope.backend if backend is None else backend),
    )
    if axis_index_groups is None:
        return call
    return call.replace(index_groups=_index_groups(axis_index_groups, call))


def _backend(backend: str | None) -> str | None:
    """Return the backend as far as it is known without devices.

    ``JAXCOMM_BACKEND=xla`` settles it, unless :func:`jaxcomm.init` chose otherwise for
    some mesh.
    """
    if backend is not None or config.backend() != "xla":
        return backend
    return None if cache.chosen_backends() - {"xla"} else "xla"


def _index_groups(axis_index_groups, call: Call) -> replica_groups.IndexGroups:
    try:
        groups = [[_index(index) for index in group] for group in axis_index_groups]
    except TypeError:
        raise TypeError(
            f"{call.where}: axis_index_groups must be sequences of integers "
            f"known when the program is traced, such as [[0, 1], [2, 3]], got "
            f"{axis_index_groups!r}"
        ) from None
    return replica_groups.canonical_index_groups(groups, call.axes_size)


def check_leaves(x, call: Call) -> None:
    """Raise TypeError if a leaf of the pytree is neither an array nor a number."""
    for leaf in jax.tree.leaves(x):
        if not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)
        ):
            raise TypeError(
                f"{call.where}: every leaf of x must be an array, got "
                f"{type(leaf).__name__}"
            )


def as_arrays(x, call: Call):
    """Return the pytree with arrays for leaves.

    Raises:
      TypeError: if a leaf is not an array of a type that can travel.
    """
    check_leaves(x, call)

    def as_array(leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{call.where}: x has dtype {leaf.dtype}; send "
                f"jax.random.key_data(x) and wrap what arrives in "
                f"jax.random.wrap_key_data"
            )
        if leaf.dtype.name.startswith("float6_"):
            raise TypeError(
                f"{call.where}: x has dtype {leaf.dtype}, which XLA cannot hand "
                f"to a custom call; cast it first, to bfloat16 without loss"
            )
        return leaf

    return jax.tree.map(as_array, x)


def summed(x: PyTree, call: Call) -> Call:
    """Return the call of a sum, which also takes operands that are unreduced.

    Raises:
      NotImplementedError: if unreduced operands are to be summed within groups.
      ValueError: if some leaves are unreduced over the axes and others are not.
    """
    if not compat.checks_varying_axes():
        return call
    axes = frozenset(call.axes)
    found = {bool(jax.typeof(leaf).mat.unreduced & axes) for leaf in jax.tree.leaves(x)}
    if True not in found:
        return call
    if call.index_groups is not None:
        raise NotImplementedError(
            f"{call.where}: x is unreduced, which axis_index_groups cannot divide; "
            f"leave them out"
        )
    if False in found:
        raise ValueError(
            f"{call.where}: some leaves of x are unreduced and others are not; make "
            f"one call for each kind"
        )
    return call.replace(given="unreduced")


def kind_of(x: jax.Array, call: Call) -> str:
    """Return how an array is typed over the axes of a call.

    Returns:
      ``"varying"``, ``"unreduced"``, ``"reduced"`` or ``"invarying"``.

    Raises:
      ValueError: if it is typed otherwise over one of the axes than over another.
    """
    found = jax.typeof(x).mat

    def kind(axis):
        for each in ("varying", "unreduced", "reduced"):
            if axis in getattr(found, each):
                return each
        return "invarying"

    kinds = {kind(axis) for axis in call.axes}
    if len(kinds) > 1:
        raise ValueError(
            f"{call.where}: x is {' and '.join(sorted(kinds))} over different axes; "
            f"make one call for each kind. Its type is {jax.typeof(x)}."
        )
    return kinds.pop()


def root(value, call: Call, what: str = "root") -> int:
    """Return a root, called ``what``, checked to be an index along the axes.

    Raises:
      TypeError: if it is no integer.
      ValueError: if it is out of range.
    """
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
        return _index(value)
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
    """Return what ``pshuffle`` takes.

    Raises:
      TypeError: if it is something else.
    """
    try:
        return [_index(index) for index in perm]
    except TypeError:
        raise TypeError(
            f"{call.where}: perm must be a sequence of integers known when the "
            f"program is traced, the source of each index along the axis, got "
            f"{perm!r}. Pairs (source, destination) go to jaxcomm.ppermute."
        ) from None


def index_pairs(perm, call: Call) -> tuple[tuple[int, int], ...]:
    """Return what ``ppermute`` takes.

    Raises:
      TypeError: if it is something else.
      ValueError: if an entry is not of length two.
    """
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
    """Return the pytree with bools as int32, the type jax.lax counts them in."""

    def count(leaf):
        is_bool = getattr(leaf, "dtype", None) == jnp.bool_ or isinstance(leaf, bool)
        return jnp.asarray(leaf, jnp.int32) if is_bool else leaf

    return jax.tree.map(count, x)


def canonical_dimension(dimension: int, ndim: int, name: str, what: str) -> int:
    """Return a dimension counted from the front.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if there is no such dimension.
    """
    dimension = integer(dimension, f"{name}: {what}")
    if not -ndim <= dimension < ndim:
        raise OutOfRangeError(
            f"{name}: {what} {dimension} is out of range for an array of {ndim} "
            f"dimensions"
        )
    return dimension % ndim


def has_carrier(dtype) -> bool:
    """Say whether arrays of this type travel as a wider one."""
    return dtype.name in _CARRIERS


def to_carrier(leaf):
    """Return the array in the type it travels as."""
    carrier = _CARRIERS.get(leaf.dtype.name)
    return leaf if carrier is None else leaf.astype(carrier)
