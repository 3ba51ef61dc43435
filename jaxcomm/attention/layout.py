"""A layout: which rank holds which tokens of a sequence, as one value."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import (
    checked,
    no_positions,
    places_of,
    take,
    token_numbers,
)
from jaxcomm.attention.schedules.registry import get_schedule
from jaxcomm.attention.schedules.schedule import Schedule
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import arguments
from jaxcomm.primitives.call import AxisName


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens of a sequence each of ``size`` ranks holds.

    Make one, reorder the batch with it in the data pipeline, and pass it to
    ``ring_attention``, with the positions that :meth:`reorder` returns. Masks and
    padding follow from the layout. The positions travel with the tokens, so the call
    notices where tokens and layout disagree.

    A layout is a pytree. It has no leaves unless ``order`` is given: then pass it
    through ``jax.jit`` and ``jax.shard_map`` (with ``jax.P()``) like other data.

    Attributes:
      schedule: ``"contiguous"``, ``"zigzag"``, ``"striped"`` or a ``Schedule``.
      size: number of ranks.
      length: tokens of the whole sequence, before padding.
      order: int32 (size, local length), the position of every token that each rank
        holds, where it is data and not a rule: see :func:`document_layout`. Or (B,
        size, local length) if the sequences of a batch differ. Each number below
        ``size * local_length`` is there once, and padding has those from ``length``
        on. If None, the schedule says it.

    Raises:
      ValueError: the schedule is unknown, ``size`` is below one, ``length`` is
        negative, or ``order`` is of another shape or of other numbers.
      TypeError: ``schedule``, ``size``, ``length`` or ``order`` is of another type.

    >>> layout = Layout("zigzag", size=2, length=7)
    >>> x, positions = layout.reorder(jnp.arange(1, 8), axis=0)
    >>> x
    Array([1, 2, 7, 0, 3, 4, 5, 6], dtype=int32)
    >>> positions
    Array([ 0,  1,  6, -1,  2,  3,  4,  5], dtype=int32)
    >>> layout.restore(x, positions, axis=0)
    Array([1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """

    schedule: Schedule
    size: int
    length: int
    order: Any = None

    def __init__(
        self, schedule: str | Schedule, size: int, length: int, order: Any = None
    ):
        size = arguments.integer(size, "Layout: size")
        length = arguments.integer(length, "Layout: length")
        if size < 1:
            raise ValueError(
                f"Layout: size={size} ranks. Pass the size of the mesh axis, one or "
                "more."
            )
        if length < 0:
            raise ValueError(f"Layout: length={length} tokens. Pass zero or more.")
        schedule = get_schedule(schedule)
        self._set(schedule, size, length, _checked_order(order, size, length))

    def _set(self, schedule, size, length, order):
        names = ("schedule", "size", "length", "order")
        for name, found in zip(names, (schedule, size, length, order), strict=True):
            object.__setattr__(self, name, found)

    @property
    def local_length(self) -> int:
        """The number of tokens that each rank holds, padding included."""
        if self.order is not None:
            return self.order.shape[-1]
        return self.schedule.local_length(self.size, self.length)

    @property
    def is_static(self) -> bool:
        """Whether the positions are known when a program is traced."""
        return self.order is None

    @property
    def is_natural(self) -> bool:
        """Whether tokens in their natural order need no reordering."""
        if not self.is_static:
            return False
        held = self.all_positions()
        return np.array_equal(held, np.arange(held.size))

    @property
    def segments(self) -> tuple[int, ...]:
        """The lengths of the parts of a rank's tokens that a tile should not straddle.

        They sum to ``local_length``.
        """
        if not self.is_static:
            return (self.local_length,)
        return self.schedule.segments(self.local_length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self._key() == other._key() and self.order is other.order

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self):
        return self.schedule, self.size, self.length

    def positions_of(self, rank: Any) -> Any:
        """Return the positions of the tokens that a rank holds.

        Args:
          rank: int or traced int32 scalar.

        Returns:
          int32 array (local length,) or (B, local length). Padding has positions from
          ``length`` on. A numpy array if ``rank`` is a Python int and the layout has no
          ``order``.
        """
        if not self.is_static:
            return jnp.asarray(self.order)[..., rank, :]
        return self.schedule.positions(rank, self.size, self.local_length)

    def all_positions(self) -> Any:
        """Return the positions in rank order: (size * local length,), or (B, ...)."""
        if not self.is_static:
            return self.order.reshape(*self.order.shape[:-2], -1)
        return self.schedule.shard(self.size, self.local_length)

    def reorder(self, x: Any, axis: int = 1) -> tuple[Any, Any]:
        """Permute a batch so that an even split gives every rank its tokens.

        Padding is zeros. An array stays sharded as it is; numpy arrays stay numpy.

        Args:
          x: pytree of arrays whose dimension ``axis`` is the sequence in its natural
            order, any dtype.
          axis: the dimension that counts tokens.

        Returns:
          (x, positions). A pytree like ``x``, whose dimension ``axis`` has ``size *
          local_length`` tokens: those of rank 0, then those of rank 1, and so on. And
          int32, of the shape of the first array up to ``axis``: the position of each
          token, -1 for padding. Split it as the tokens are, and hand it to all that
          ask for positions: ``ring_attention``, RoPE, :meth:`restore`.

        Raises:
          ValueError: ``axis`` is out of range, an array has another length than the
            layout, or ``x`` has no array.
          TypeError: ``axis`` is no integer.
        """
        what = "Layout.reorder"
        places = self.all_positions()

        def one(leaf):
            leaf, at = checked(leaf, axis, what)
            if leaf.shape[at] != self.length:
                raise ValueError(
                    f"{what}: dimension {at} of x has {leaf.shape[at]} tokens, and the "
                    f"layout is of {self.length}. Pass a sequence of that length in "
                    "its natural order, or make a layout for this one."
                )
            self._check_rows(leaf, at, what)
            return take(leaf, places, at)

        out = jax.tree.map(one, x)
        leaves = jax.tree.leaves(x)
        if not leaves:
            raise ValueError(f"{what}: x has no array. Pass one or more.")
        first, at = checked(leaves[0], axis, what)
        return out, take(token_numbers(first, at), places, at, fill=PADDING)

    def restore(self, x: Any, positions: Any = None, axis: int = 1) -> Any:
        """Undo :meth:`reorder`: put the tokens of all ranks back into natural order.

        The positions say where each token belongs, so no other layout can mix them up.

        Args:
          x: pytree of arrays whose dimension ``axis`` holds the tokens of rank 0, then
            those of rank 1, and so on.
          positions: as :meth:`reorder` returned them: int32 of the shape of ``x`` up to
            ``axis``, or (tokens,). If None, those of tokens that are in their natural
            order: of a contiguous layout.
          axis: the dimension that counts tokens.

        Returns:
          A pytree like ``x`` in natural order, without the padding. Where the positions
          are not those of one sequence of ``length`` tokens, all of it is NaN, or what
          ``jax.numpy`` fills other dtypes with; outside of ``jax.jit`` it raises.

        Raises:
          ValueError: ``axis`` is out of range; ``x`` or the positions have another
            shape than ``reorder`` gave them, or are of another layout.
          TypeError: ``axis`` is no integer; or positions are missing.
        """
        what = "Layout.restore"
        if positions is None:
            if not self.is_natural:
                raise TypeError(f"{what}: {no_positions(self.schedule)}")
            positions = np.arange(self.size * self.local_length, dtype=np.int32)
            positions = np.where(positions < self.length, positions, PADDING)
        elif not isinstance(positions, jax.Array):
            positions = np.asarray(positions)
        held = self.size * self.local_length
        if positions.shape[-1:] != (held,):
            raise ValueError(
                f"{what}: positions of shape {positions.shape}, and the {self.size} "
                f"ranks of the layout hold {held} tokens. Pass what reorder returned, "
                "padding included."
            )
        has_rows = not self.is_static and self.order.ndim == 3
        places = places_of(positions, self.length, has_rows, what)

        def one(leaf):
            leaf, at = checked(leaf, axis, what)
            if leaf.shape[at] != held:
                raise ValueError(
                    f"{what}: dimension {at} of x has {leaf.shape[at]} tokens, and the "
                    f"{self.size} ranks of the layout hold {held}. Pass what reorder "
                    "returned, padding included."
                )
            self._check_rows(leaf, at, what)
            return take(leaf, places, at, fill=None)

        return jax.tree.map(one, x)

    def places(self) -> Any:
        """Return where each position is in rank order, shaped as all positions are."""
        at = self.all_positions()
        if isinstance(at, np.ndarray):
            return np.argsort(at, kind="stable").astype(np.int32)
        return jnp.argsort(at)

    def check_axis(self, axis_name: AxisName, what: str) -> int:
        """Return the size of an axis, or say that it is not the layout's.

        Raises:
          NameError: the axis is not bound.
          ValueError: it has another size.
        """
        axes = replica_groups.canonical_axes(axis_name)
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(
                f"{what}: axis_name={axis_name!r} names "
                f"{'an axis twice' if axes else 'no axis'}. Pass each axis that splits "
                "the sequence once."
            )
        compat.check_axes_bound(axes, what)
        size = jax.lax.axis_size(axes)
        if size != self.size:
            raise ValueError(
                f"{what}: the layout is of {self.size} ranks, and axis {axis_name!r} "
                f"has {size}. Reorder the sequence with a layout of size={size}."
            )
        return size

    def _check_rows(self, leaf, axis: int, what: str) -> None:
        """Check that an array has the rows of a layout that differs by row."""
        if self.is_static or self.order.ndim < 3:
            return
        rows = self.order.shape[0]
        if axis < 1 or leaf.shape[0] != rows:
            raise ValueError(
                f"{what}: the layout is of a batch of {rows} sequences, and x has shape"
                f" {leaf.shape} with tokens in dimension {axis}. Pass arrays whose "
                f"dimension 0 has the {rows} sequences."
            )


def _flatten_with_keys(layout: Layout):
    return ((jax.tree_util.GetAttrKey("order"), layout.order),), layout._key()


def _unflatten(key, leaves) -> Layout:
    """Return a layout of whatever stands for its order: JAX puts anything there."""
    layout = object.__new__(Layout)
    layout._set(*key, *leaves)
    return layout


jax.tree_util.register_pytree_with_keys(Layout, _flatten_with_keys, _unflatten)


def _checked_order(order, size: int, length: int):
    """Return the order of a layout as int32, if each token is there once.

    Raises:
      TypeError: it is no array of integers.
      ValueError: it is of another shape, or its known numbers are others.
    """
    if order is None:
        return None
    if not compat.is_tracer(order) and not isinstance(order, jax.Array):
        order = np.asarray(order)
    if not jnp.issubdtype(order.dtype, jnp.integer):
        raise TypeError(
            f"Layout: order has dtype {order.dtype}. Pass the positions that each of "
            f"the {size} ranks holds, int32."
        )
    shape = order.shape
    if len(shape) not in (2, 3) or shape[-2] != size or size * shape[-1] < length:
        raise ValueError(
            f"Layout: order has shape {shape}, for {length} tokens on {size} ranks. "
            "Pass (ranks, tokens of a rank), or (batch, ranks, tokens of a rank), with "
            "room for all tokens."
        )
    known = compat.known_value(order)
    if known is not None:
        held = size * shape[-1]
        for row in known.reshape(math.prod(shape[:-2]), held):
            if not np.array_equal(np.sort(row), np.arange(held)):
                raise ValueError(
                    f"Layout: order has {np.array2string(row, threshold=8)}, and each "
                    f"of 0 to {held - 1} is expected once. Pass the position of each "
                    f"token that a rank holds; padding has those from {length} on."
                )
    return order if order.dtype == np.int32 else order.astype(np.int32)
