"""Put a sequence into the order of a schedule, and back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.schedules.registry import get_schedule
from jaxcomm.attention.schedules.schedule import Schedule
from jaxcomm.primitives import arguments


def _check_size(what: str, size: int) -> None:
    arguments.integer(size, f"{what}: size")
    if size < 1:
        raise ValueError(f"{what}: size={size} ranks. A ring has at least one rank.")


def _check_axis(what: str, leaf, axis: int) -> int:
    arguments.integer(axis, f"{what}: axis")
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"{what}: axis={axis} was asked for, but x has shape {leaf.shape}. Pass "
            "the axis that counts tokens."
        )
    return axis % leaf.ndim


def _permute(leaf, index: np.ndarray, axis: int):
    if np.array_equal(index, np.arange(index.size)):
        return leaf
    return jnp.take(leaf, index, axis=axis, unique_indices=True, mode="clip")


def reorder(x, size: int, *, schedule: str | Schedule, axis: int = 1):
    """Permute a sequence so that an even split gives every rank its tokens.

    The sequence is padded with zeros at its end to a multiple of ``size``. Pass the
    length before padding as ``length=`` to ``ring_attention`` and ``restore``.

    Args:
      x: pytree of arrays whose dimension ``axis`` is the whole sequence in its natural
        order, any dtype.
      size: number of ranks in the ring.
      schedule: name of a schedule, or a ``Schedule``.
      axis: the dimension that counts tokens.

    Returns:
      A pytree like ``x``; dimension ``axis`` has ``size * ceil(length / size)`` tokens:
      those of rank 0, then those of rank 1, and so on.

    Raises:
      ValueError: ``size`` is below one, ``axis`` is out of range, or the schedule is
        unknown.
      TypeError: ``size`` or ``axis`` is no integer.

    >>> reorder(jnp.arange(1, 8), 2, schedule="zigzag", axis=0)
    Array([1, 2, 7, 0, 3, 4, 5, 6], dtype=int32)
    """
    _check_size("reorder", size)
    dealer = get_schedule(schedule)

    def one(leaf):
        leaf = jnp.asarray(leaf)
        dimension = _check_axis("reorder", leaf, axis)
        length = leaf.shape[dimension]
        local = dealer.local_length(size, length)
        padding = [(0, 0)] * leaf.ndim
        padding[dimension] = (0, size * local - length)
        return _permute(jnp.pad(leaf, padding), dealer.shard(size, local), dimension)

    return jax.tree.map(one, x)


def restore(
    x,
    size: int,
    *,
    schedule: str | Schedule,
    axis: int = 1,
    length: int | None = None,
):
    """Undo :func:`reorder`: put the tokens of all ranks back into natural order.

    Args:
      x: pytree of arrays whose dimension ``axis`` holds the tokens of rank 0, then
        those of rank 1, and so on.
      size: number of ranks in the ring.
      schedule: the schedule that ``reorder`` was given.
      axis: the dimension that counts tokens.
      length: number of tokens before padding. If None, the padding is kept.

    Returns:
      A pytree like ``x`` in natural order, cut to ``length`` tokens.

    Raises:
      ValueError: dimension ``axis`` is not divisible by ``size``, or is shorter than
        ``length``.
      TypeError: ``size``, ``axis`` or ``length`` is no integer.

    >>> y = reorder(jnp.arange(1, 8), 2, schedule="zigzag", axis=0)
    >>> restore(y, 2, schedule="zigzag", axis=0, length=7)
    Array([1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    _check_size("restore", size)
    dealer = get_schedule(schedule)

    def one(leaf):
        leaf = jnp.asarray(leaf)
        dimension = _check_axis("restore", leaf, axis)
        tokens = leaf.shape[dimension]
        if tokens % size:
            raise ValueError(
                f"restore: dimension {dimension} of x has {tokens} tokens, not "
                f"divisible by the {size} ranks. Pass what reorder returned, padding "
                "included."
            )
        if length is not None:
            arguments.integer(length, "restore: length")
        kept = tokens if length is None else length
        if not 0 <= kept <= tokens:
            raise ValueError(
                f"restore: length={length} was asked for, but dimension {dimension} of "
                f"x has {tokens} tokens. Pass the length before padding."
            )
        ordered = _permute(leaf, dealer.unshard(size, tokens // size), dimension)
        return jax.lax.slice_in_dim(ordered, 0, kept, axis=dimension)

    return jax.tree.map(one, x)


def positions(rank, size: int, length: int, *, schedule: str | Schedule):
    """Return the global positions of the tokens that a rank holds, as RoPE needs them.

    Args:
      rank: int or traced int32 scalar such as ``jax.lax.axis_index(axis_name)``.
      size: number of ranks in the ring.
      length: number of tokens of the whole sequence, before padding.
      schedule: name of a schedule, or a ``Schedule``.

    Returns:
      int32 array of shape ``(ceil(length / size),)``. Padding has positions from
      ``length`` on.

    Raises:
      ValueError: ``size`` is below one, ``length`` is negative, ``rank`` is an int
        outside ``range(size)``, or the schedule is unknown.
      TypeError: ``rank``, ``size`` or ``length`` is no integer.

    >>> positions(0, 2, 7, schedule="zigzag")
    Array([0, 1, 6, 7], dtype=int32)
    """
    _check_size("positions", size)
    arguments.integer(length, "positions: length")
    if length < 0:
        raise ValueError(f"positions: length={length} tokens. Pass zero or more.")
    if isinstance(rank, jax.Array):
        if rank.shape or not jnp.issubdtype(rank.dtype, jnp.integer):
            raise TypeError(
                f"positions: rank must be one integer, got {rank.dtype}"
                f"{list(rank.shape)}"
            )
    else:
        rank = arguments.integer(rank, "positions: rank")
    if isinstance(rank, int) and not 0 <= rank < size:
        raise ValueError(
            f"positions: rank={rank} is outside the {size} ranks. Pass 0 to {size - 1}."
        )
    dealer = get_schedule(schedule)
    return jnp.asarray(
        dealer.positions(rank, size, dealer.local_length(size, length)), jnp.int32
    )
