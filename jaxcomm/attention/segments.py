"""The documents of tokens, as int32, whatever integers the user has."""

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


def lengths_of(x):
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


def segment_ids_of(ids, lengths, positions, shape, name: str, argument: str):
    """Return the segment ids of a rank's tokens, or None if there is nothing to say.

    Args:
      ids: int (B, T) or None, as given.
      lengths: int (B,) or None: tokens at this position or later are padding.
      positions: int32 (T,) or (B, T), of the tokens.
      shape: (B, T).
      name: ``"query"`` or ``"key_value"``.
      argument: the function that was called.

    Raises:
      TypeError: they are no integers.
      ValueError: they are of another shape.
    """
    for what, found, expected in (
        (f"{name}_segment_ids", ids, shape),
        (f"{name}_seq_lengths", lengths, shape[:1]),
    ):
        if found is None:
            continue
        found = jnp.asarray(found)
        if not jnp.issubdtype(found.dtype, jnp.integer):
            raise TypeError(
                f"{argument}: {what} has dtype {found.dtype}. Pass integers."
            )
        if found.shape != expected:
            raise ValueError(
                f"{argument}: {what} has shape {found.shape} on this rank, and "
                f"{expected} is expected. Split segment ids as the tokens are; pass "
                "one length for each sequence of the batch."
            )
    if ids is None and lengths is None:
        return None
    ids = jnp.zeros(shape, jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    if lengths is not None:
        lengths = jnp.asarray(lengths).astype(jnp.int32)
        ids = jnp.where(positions < lengths[:, None], ids, PADDING)
    return ids
