"""Which rank holds which tokens of a sequence: the rule, and what came of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import (
    checked,
    checked_order,
    natural_ids,
    shifted,
    take,
    token_numbers,
)
from jaxcomm.attention.schedules import Schedule, get_schedule
from jaxcomm.attention.tokens import Tokens
from jaxcomm.attention.visibility import table_of
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.primitives import arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens of a sequence each of ``size`` ranks holds.

    Make one, and reorder the batch with it in the data pipeline. :meth:`reorder` also
    returns :class:`Tokens`, which say where each token is: pass them to
    ``ring_attention``. Masks and padding follow from them.

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
    >>> x, tokens = layout.reorder(jnp.arange(1, 8), axis=0)
    >>> x
    Array([1, 2, 7, 0, 3, 4, 5, 6], dtype=int32)
    >>> tokens.positions
    Array([ 0,  1,  6, -1,  2,  3,  4,  5], dtype=int32)
    >>> tokens.restore(x, axis=0)
    Array([1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """

    schedule: Schedule
    size: int
    length: int
    order: Any = None
    _key: Any = dataclasses.field(init=False, repr=False)

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
        self._set(schedule, size, length, checked_order(order, size, length))

    def _set(self, schedule, size, length, order):
        # The key is made once: a call asks for it some thirty times.
        key = schedule, size, length
        vars(self).update(
            schedule=schedule, size=size, length=length, order=order, _key=key
        )

    @functools.cached_property
    def is_static(self) -> bool:
        """Whether the positions are known when a program is traced."""
        return self.order is None

    @functools.cached_property
    def local_length(self) -> int:
        """The number of tokens that each rank holds, padding included."""
        if self.order is not None:
            return self.order.shape[-1]
        return self.schedule.local_length(self.size, self.length)

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
        if self._key != other._key:
            return False
        if isinstance(self.order, jax.ShapeDtypeStruct):
            return self.order == other.order
        return self.order is other.order

    def __hash__(self) -> int:
        return hash(self._key)

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
            return jnp.asarray(self._numbers())[..., rank, :]
        return self.schedule.positions(rank, self.size, self.local_length)

    def all_positions(self) -> Any:
        """Return the positions in rank order: (size * local length,), or (B, ...)."""
        if not self.is_static:
            order = self._numbers()
            return order.reshape(*order.shape[:-2], -1)
        return self.schedule.shard(self.size, self.local_length)

    def _numbers(self):
        """Return the order, which is not the shape of one alone."""
        if isinstance(self.order, jax.ShapeDtypeStruct):
            raise TypeError(
                f"Layout: the layout {self.schedule!r} of tokens has the shape of its "
                "order alone. The numbers are in tokens.positions. Call the layout "
                "whose reorder returned the tokens."
            )
        if self.order.shape[-2] != self.size:
            raise TypeError(
                "Layout: this one knows the tokens of one rank alone. Pass it through "
                "layout.of_all_ranks first."
            )
        return self.order

    @property
    def differs_by_row(self) -> bool:
        """Whether the sequences of a batch have orders of their own."""
        return not self.is_static and self.order.ndim == 3

    def _with_order(self, order: Any) -> "Layout":
        """Return this layout with another ``order``, which nobody checks."""
        layout = object.__new__(Layout)
        layout._set(self.schedule, self.size, self.length, order)
        return layout

    def reorder(
        self,
        x: Any,
        axis: int = 1,
        *,
        segment_ids: Any = None,
        lengths: Any = None,
        shift: int = 0,
    ) -> tuple[Any, "Tokens"]:
        """Permute a batch so that an even split gives every rank its tokens.

        Padding is zeros. An array stays sharded as it is; numpy arrays stay numpy.

        Args:
          x: pytree of arrays whose dimension ``axis`` is the sequence in its natural
            order, any dtype.
          axis: the dimension that counts tokens.
          segment_ids: int (B, length) or (length,), in natural order: the document of
            each token. Tokens see those of their document alone. A negative id is
            padding.
          lengths: int (B,), or an int for all: tokens at this position or later are
            padding.
          shift: by how many positions: each token gets what is so many behind it in
            its document, a run of tokens of one id. With 1 the ids of tokens become
            labels of the next token. Where the document has no such token, signed
            integers are -1, and floats 0: leave these out of a loss.

        Returns:
          (x, tokens). A pytree like ``x``, whose dimension ``axis`` has ``size *
          local_length`` tokens: those of rank 0, then those of rank 1, and so on. And
          :class:`Tokens`, whose arrays have the shape of the first array up to
          ``axis``. Split them as the batch is.

        Raises:
          ValueError: ``axis`` is out of range, an array has another length than the
            layout, ``x`` has no array, or ids or lengths have another shape.
          TypeError: ``axis`` or ``shift`` is no integer, ids or lengths are no
            integers, or what is to be shifted has no number for "none".

        >>> layout = Layout("zigzag", size=2, length=4)
        >>> labels, _ = layout.reorder(jnp.array([5, 6, 7, 8]), axis=0, shift=1)
        >>> labels
        Array([ 6, -1,  7,  8], dtype=int32)
        """
        what = "Layout.reorder"
        places = self.all_positions()
        shift = arguments.integer(shift, f"{what}: shift")
        if shift < 0:
            raise ValueError(
                f"{what}: shift={shift}. Pass zero, or how many positions ahead a "
                "label is. For earlier tokens call jaxcomm.attention.state.causal_halo."
            )

        def one(leaf):
            leaf, at = checked(leaf, axis, what)
            if leaf.shape[at] != self.length:
                raise ValueError(
                    f"{what}: dimension {at} of x has {leaf.shape[at]} tokens, and the "
                    f"layout is of {self.length}. Pass a sequence of that length in "
                    "its natural order, or make a layout for this one."
                )
            self._check_rows(leaf, at, what)
            if not shift:
                return take(leaf, places, at)
            numbers = token_numbers(leaf, at)
            ids = natural_ids(segment_ids, lengths, numbers, what)
            leaf, none = shifted(leaf, at, shift, ids, what)
            return take(leaf, places, at, fill=none)

        out = jax.tree.map(one, x)
        leaves = jax.tree.leaves(x)
        if not leaves:
            raise ValueError(f"{what}: x has no array. Pass one or more.")
        first, at = checked(leaves[0], axis, what)
        numbers = token_numbers(first, at)
        ids = natural_ids(segment_ids, lengths, numbers, what)
        positions, ids = (
            None if each is None else take(each, places, at, fill=PADDING)
            for each in (numbers, ids)
        )
        # Of data the shape is enough: the numbers are in the positions.
        order = None
        if not self.is_static:
            order = jax.ShapeDtypeStruct(self.order.shape, np.int32)
        tokens = Tokens(self._with_order(order), positions, ids)
        if ids is None:
            return out, tokens
        table = table_of(self.all_positions(), ids, self.size)
        return out, dataclasses.replace(tokens, table=table)

    def places(self) -> Any:
        """Return where each position is in rank order, shaped as all positions are."""
        at = self.all_positions()
        if isinstance(at, np.ndarray):
            return np.argsort(at, kind="stable").astype(np.int32)
        return jnp.argsort(at).astype(jnp.int32)

    def _check_rows(self, leaf, axis: int, what: str) -> None:
        """Check that an array has the rows of a layout that differs by row."""
        if not self.differs_by_row:
            return
        rows = self.order.shape[0]
        if axis < 1 or leaf.shape[0] != rows:
            raise ValueError(
                f"{what}: the layout is of a batch of {rows} sequences, and x has shape"
                f" {leaf.shape} with tokens in dimension {axis}. Pass arrays whose "
                f"dimension 0 has the {rows} sequences."
            )


def _parts_of_layout(layout: Layout):
    return ((jax.tree_util.GetAttrKey("order"), layout.order),), layout._key


def _layout_of(key, leaves) -> Layout:
    """Return a layout of whatever stands for its order: JAX puts anything there."""
    layout = object.__new__(Layout)
    layout._set(*key, *leaves)
    return layout


jax.tree_util.register_pytree_with_keys(Layout, _parts_of_layout, _layout_of)


# A rank has its own part of an order that is data, and asks the others for theirs. Its
# own is an order of one rank: (1, local length) or (B, 1, local length).


def knows_all_ranks(layout: Layout) -> bool:
    """Say whether a layout knows the positions of all ranks."""
    return layout.is_static or layout.order.shape[-2] == layout.size


def of_this_rank(layout: Layout, positions: Any) -> Layout:
    """Return a layout that knows this rank's positions alone: (..., T), -1 padding."""
    return layout._with_order(jnp.expand_dims(positions, -2))


def of_all_ranks(layout: Layout, axis_name: Any) -> Layout:
    """Return a layout that knows all positions; it asks the others, if need be."""
    if knows_all_ranks(layout):
        return layout
    axis = layout.order.ndim - 2
    order = all_gather(layout.order, axis_name, axis=axis, tiled=True)
    return layout._with_order(_with_numbers(layout, order))


def positions_here(layout: Layout, rank: Any) -> Any:
    """Return the positions that this rank holds, which is ``rank``."""
    if knows_all_ranks(layout):
        return layout.positions_of(rank)
    return _with_numbers(layout, layout.order[..., 0, :])


def _with_numbers(layout: Layout, positions):
    """Return positions of which padding has those behind all tokens."""
    return jnp.where(positions < 0, layout.length, positions)
