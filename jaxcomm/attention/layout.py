"""A layout: which rank holds which tokens of a sequence, as one value."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.schedules.registry import get_schedule
from jaxcomm.attention.schedules.schedule import Schedule
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import arguments


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order"],
    meta_fields=["schedule", "size", "length"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens of a sequence each of ``size`` ranks holds.

    Make one, reorder the tokens with it in the data pipeline, and pass it to
    ``ring_attention``. Masks, padding and positions follow from it, so the data and the
    call cannot disagree about schedule, ring size or length.

    A layout is a pytree. It has no leaves unless ``order`` is given: then pass it
    through ``jax.jit`` and ``jax.shard_map`` (with ``jax.P()``) like other data.

    Attributes:
      schedule: ``"contiguous"``, ``"zigzag"``, ``"striped"`` or a ``Schedule``.
      size: number of ranks.
      length: tokens of the whole sequence, before padding.
      order: int32 (size, local length), the position of every token that each rank
        holds, where it is data and not a rule: see :func:`document_layout`. If None,
        the schedule says it.

    Raises:
      ValueError: the schedule is unknown, ``size`` is below one, or ``length`` is
        negative.
      TypeError: ``schedule``, ``size`` or ``length`` is of another type.

    >>> layout = Layout("zigzag", size=2, length=7)
    >>> x = layout.reorder(jnp.arange(1, 8), axis=0)
    >>> x
    Array([1, 2, 7, 0, 3, 4, 5, 6], dtype=int32)
    >>> layout.restore(x, axis=0)
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
        for name, found in (
            ("schedule", get_schedule(schedule)),
            ("size", size),
            ("length", length),
            ("order", order),
        ):
            object.__setattr__(self, name, found)

    @property
    def local_length(self) -> int:
        """The number of tokens that each rank holds, padding included."""
        if self.order is not None:
            return self.order.shape[1]
        return self.schedule.local_length(self.size, self.length)

    @property
    def is_static(self) -> bool:
        """Whether the positions are known when a program is traced."""
        return self.order is None

    @property
    def segments(self) -> tuple[int, ...]:
        """The lengths of the parts of a rank's tokens that a tile should not straddle.

        They sum to ``local_length``.
        """
        if not self.is_static:
            return (self.local_length,)
        return self.schedule.segments(self.local_length)

    def __eq__(self, other):
        if not isinstance(other, Layout):
            return NotImplemented
        return self._key() == other._key() and self.order is other.order

    def __hash__(self):
        return hash(self._key())

    def _key(self):
        return self.schedule, self.size, self.length

    def positions_of(self, rank):
        """Return the positions of the tokens that a rank holds.

        Args:
          rank: int or traced int32 scalar.

        Returns:
          int32 array (local length,). Padding has positions from ``length`` on. A numpy
          array if ``rank`` is a Python int and the layout has no ``order``.
        """
        if not self.is_static:
            return jnp.asarray(self.order)[rank]
        return self.schedule.positions(rank, self.size, self.local_length)

    def positions(self, axis_name) -> jax.Array:
        """Return the positions of this rank's tokens, as RoPE needs them.

        Call it inside ``jax.shard_map``.

        Args:
          axis_name: the mesh axis, or tuple of axes, that splits the sequence.

        Returns:
          int32 array (local length,). Padding has positions from ``length`` on.

        Raises:
          NameError: the axis is not bound.
          ValueError: the axis has another size than the layout.
        """
        self.check_axis(axis_name, "Layout.positions")
        rank = jax.lax.axis_index(axis_name)
        return jnp.asarray(self.positions_of(rank), jnp.int32)

    def all_positions(self):
        """Return the position of each token in rank order, (size * local length,)."""
        if not self.is_static:
            return self.order.reshape(-1)
        return self.schedule.shard(self.size, self.local_length)

    def reorder(self, x, axis: int = 1):
        """Permute a sequence so that an even split gives every rank its tokens.

        Padding is zeros. An array stays sharded as it is; numpy arrays stay numpy.

        Args:
          x: pytree of arrays whose dimension ``axis`` is the sequence in its natural
            order, any dtype.
          axis: the dimension that counts tokens.

        Returns:
          A pytree like ``x``; dimension ``axis`` has ``size * local_length`` tokens:
          those of rank 0, then those of rank 1, and so on.

        Raises:
          ValueError: ``axis`` is out of range, or has another length than the layout.
          TypeError: ``axis`` is no integer.
        """
        places = self.all_positions()

        def one(leaf):
            leaf, axis_ = _checked(leaf, axis, "Layout.reorder")
            if leaf.shape[axis_] != self.length:
                raise ValueError(
                    f"Layout.reorder: dimension {axis_} of x has {leaf.shape[axis_]} "
                    f"tokens, and the layout is of {self.length}. Pass a sequence of "
                    "that length in its natural order, or make a layout for this one."
                )
            return _take(leaf, places, axis_)

        return jax.tree.map(one, x)

    def restore(self, x, axis: int = 1):
        """Undo :meth:`reorder`: put the tokens of all ranks back into natural order.

        Args:
          x: pytree of arrays whose dimension ``axis`` holds the tokens of rank 0, then
            those of rank 1, and so on.
          axis: the dimension that counts tokens.

        Returns:
          A pytree like ``x`` in natural order, without the padding.

        Raises:
          ValueError: ``axis`` is out of range, or has another length than ``reorder``
            gave it.
          TypeError: ``axis`` is no integer.
        """
        held = self.size * self.local_length
        places = self.places()[: self.length]

        def one(leaf):
            leaf, axis_ = _checked(leaf, axis, "Layout.restore")
            if leaf.shape[axis_] != held:
                raise ValueError(
                    f"Layout.restore: dimension {axis_} of x has {leaf.shape[axis_]} "
                    f"tokens, and the {self.size} ranks of the layout hold {held}. "
                    "Pass what reorder returned, padding included."
                )
            return _take(leaf, places, axis_)

        return jax.tree.map(one, x)

    def places(self):
        """Return where each position is in rank order, (size * local length,)."""
        at = self.all_positions()
        if isinstance(at, np.ndarray):
            return np.argsort(at, kind="stable").astype(np.int32)
        return jnp.argsort(at)

    def check_axis(self, axis_name, what: str) -> int:
        """Return the size of an axis, or say that it is not the layout's.

        Raises:
          NameError: the axis is not bound.
          ValueError: it has another size.
        """
        axes = replica_groups.canonical_axes(axis_name)
        compat.check_axes_bound(axes, what)
        size = jax.lax.axis_size(axes)
        if size != self.size:
            raise ValueError(
                f"{what}: the layout is of {self.size} ranks, and axis {axis_name!r} "
                f"has {size}. Reorder the sequence with a layout of size={size}."
            )
        return size


def _checked(leaf, axis, what):
    leaf = leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
    arguments.integer(axis, f"{what}: axis")
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"{what}: axis={axis} was asked for, but x has shape {leaf.shape}. Pass "
            "the axis that counts tokens."
        )
    return leaf, axis % leaf.ndim


def _take(leaf, places, axis: int):
    """Return the tokens at these places; zeros at places behind the end."""
    count = leaf.shape[axis]
    is_known = isinstance(places, np.ndarray)
    if is_known and np.array_equal(places, np.arange(count)):
        return leaf
    if isinstance(leaf, np.ndarray) and is_known:
        padding = [(0, 0)] * leaf.ndim
        padding[axis] = (0, max(0, int(places.max(initial=-1)) + 1 - count))
        return np.take(np.pad(leaf, padding), places, axis=axis)
    leaf = jnp.asarray(leaf)
    index = (slice(None),) * axis + (places,)
    return leaf.at[index].get(
        mode="fill",
        fill_value=0,
        unique_indices=True,
        out_sharding=_sharding(leaf, axis, len(places)),
    )


def _sharding(leaf, axis: int, count: int):
    """Return the sharding to keep on a mesh with explicit axes; None on others."""
    sharding = compat.explicit_sharding(leaf)
    if sharding is None:
        return None
    spec = list(sharding.spec) + [None] * (leaf.ndim - len(sharding.spec))
    names = spec[axis]
    if names is not None:
        names = names if isinstance(names, tuple) else (names,)
        parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
        if count % parts:
            spec[axis] = None
    return sharding.update(spec=jax.P(*spec))
