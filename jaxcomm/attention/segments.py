"""The documents of tokens, as int32, whatever integers the user has."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.mask import PADDING

_INT32 = jnp.iinfo(jnp.int32)


def ids_of(x, what: str):
    """Return document ids as int32; arrays of other types as they are.

    Args:
      x: integers, or None.
      what: who asks, and what it calls them.

    Raises:
      TypeError: their type is wider than int32, and their values are not known.
      ValueError: a value is not of int32. Cut to 32 bits, two documents could become
        one, or padding.
    """
    if not _is_wide(x):
        return x
    known = compat.known_value(x)
    if known is None:
        raise TypeError(
            f"{what} has dtype {x.dtype}, and int32 may not hold its numbers. Number "
            "the documents of a batch from 0, and pass int32."
        )
    for number in (int(known.min(initial=0)), int(known.max(initial=0))):
        if not _INT32.min <= number <= _INT32.max:
            raise ValueError(
                f"{what} has the number {number}, which int32 does not hold. Number "
                "the documents of a batch from 0, and pass int32."
            )
    return known.astype(np.int32)


def _lengths_of(x):
    """Return lengths as int32, the largest for all beyond it; others as they are."""
    if not _is_wide(x):
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    low = max(_INT32.min, int(jnp.iinfo(x.dtype).min))
    return xp.clip(x, low, _INT32.max).astype(xp.int32)


def _is_wide(x) -> bool:
    """Say whether an array is of integers that int32 does not hold."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        return False
    return jnp.iinfo(dtype).max > _INT32.max


def natural_ids(ids, lengths, numbers, what: str, whose: str = ""):
    """Return the documents of tokens in natural order, padding included, or None.

    Args:
      ids: integers (..., T) or (T,), or None.
      lengths: integers (...), or one; or None: tokens from there on are padding.
      numbers: int32 (..., T), the position of each token.
      what: who asks.
      whose: what it calls their owner, as ``"query_"``.

    Returns:
      int32 of the shape of ``numbers``; a numpy array if all are.

    Raises:
      TypeError: ids or lengths are no integers.
      ValueError: they are of another shape.
    """
    if ids is None and lengths is None:
        return None
    shape = numbers.shape
    named = (
        (f"{whose}segment_ids", ids, (shape, shape[-1:])),
        (f"{whose}seq_lengths" if whose else "lengths", lengths, (shape[:-1], ())),
    )
    found = []
    for name, x, shapes in named:
        x = x if x is None or isinstance(x, jax.Array) else np.asarray(x)
        is_ids = name.endswith("ids")
        x = ids_of(x, f"{what}: {name}") if is_ids else _lengths_of(x)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{what}: {name} has dtype {x.dtype}. Pass integers.")
        if x is not None and x.shape not in shapes:
            raise ValueError(
                f"{what}: {name} has shape {x.shape}. Pass {shapes[0]} or {shapes[1]}, "
                f"for tokens of shape {shape} in their natural order."
            )
        found.append(None if x is None else x.astype(np.int32))
    ids, lengths = found
    is_known = all(isinstance(x, (np.ndarray, type(None))) for x in (*found, numbers))
    xp = np if is_known else jnp
    ids = xp.zeros(shape, np.int32) if ids is None else xp.broadcast_to(ids, shape)
    if not is_known:
        ids = _split_as(numbers, ids)
    if lengths is None:
        return ids
    ends = xp.broadcast_to(xp.asarray(lengths)[..., None], shape)
    if not is_known:
        ends = _split_as(numbers, ends)
    return xp.where(numbers < ends, ids, np.int32(PADDING))


def _split_as(numbers, x):
    """Split an array as the tokens are, where types say how arrays are split."""
    sharding = compat.explicit_sharding(numbers)
    return x if sharding is None else jax.reshard(x, sharding)
