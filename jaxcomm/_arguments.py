"""What users hand to a collective, checked and made ready to travel."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxcomm import _jax_compat, mesh_groups

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
    from jaxcomm.collectives.vary import pvary  # its transpose is a collective

    arrays = as_arrays(list(leaves), axes, name)
    return pvary(arrays, axes, lane=lane, backend=backend) if arrays else arrays


def as_arrays(x, axes: tuple[str, ...], name: str):
    """Returns the pytree with arrays for leaves.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if a leaf is not an array of a type that can travel.
    """
    _jax_compat.check_axes_bound(axes, name)

    def as_array(leaf):
        if not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)
        ):
            raise TypeError(
                f"{name} over {axes}: every leaf of x must be an array, got "
                f"{type(leaf).__name__}"
            )
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


def group_size(axes, index_groups=None) -> int:
    """Returns the number of devices of a group.

    Raises:
      ValueError: if ``axis_index_groups`` are malformed or of unequal sizes.
    """
    size = math.prod(jax.lax.axis_size(axis) for axis in axes)
    if index_groups is None:
        return size
    sizes = {len(group) for group in index_groups}
    if len(sizes) > 1:
        raise ValueError(
            f"axis_index_groups must all be of one size here, got {index_groups}"
        )
    return sizes.pop()


def index_groups_of(axes, axis_index_groups):
    """Returns ``axis_index_groups`` checked against the axes they divide."""
    if axis_index_groups is None:
        return None
    size = math.prod(jax.lax.axis_size(axis) for axis in axes)
    return mesh_groups.canonical_index_groups(axis_index_groups, size)


def count_bools(x):
    """Returns the pytree with bools as int32, the type jax.lax counts them in."""

    def count(leaf):
        is_bool = getattr(leaf, "dtype", None) == jnp.bool_ or isinstance(leaf, bool)
        return jnp.asarray(leaf, jnp.int32) if is_bool else leaf

    return jax.tree.map(count, x)


def canonical_dimension(dimension: int, ndim: int, name: str, what: str) -> int:
    """Returns a dimension counted from the front.

    Raises:
      ValueError: if there is no such dimension.
    """
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
