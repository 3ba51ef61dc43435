"""The parameters that all collectives share, checked, as one value."""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxcomm import compat, config, renamed
from jaxcomm._built import ABSENCE
from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.backends import NAMES, check_name
from jaxcomm.communicator.lane import check_lane
from jaxcomm.communicator.replica_groups import IndexGroups

# A mesh axis, or several that number the ranks row-major.
AxisName = Hashable | Sequence[Hashable]
AxisIndexGroups = Sequence[Sequence[int]] | None
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Scope:
    """What :func:`jaxcomm.using` chooses; None for what it leaves open.

    Attributes:
      part_of: what the calls of the scope are a part of, as in :class:`Call`.
    """

    backend: str | None = None
    lane: str | None = None
    reproducible: bool = False
    part_of: str = ""


# Part of the keys of JAX's tracing and compilation caches: a jitted function that is
# called inside and outside of a scope is two programs.
SCOPE = jax.make_user_context(Scope())


@renamed.explained()
@contextlib.contextmanager
def using(
    *,
    backend: str | None = None,
    lane: str | None = None,
    reproducible: bool | None = None,
) -> Iterator[None]:
    """Choose how all calls traced inside the ``with`` block communicate.

    A call's own argument of the same name comes first, then the innermost block, then
    :func:`jaxcomm.init`. Gradients use what their calls used.

    Args:
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. None leaves it as it is outside.
      lane: a lane. None leaves it as it is outside.
      reproducible: True makes the bits of sums independent of the number of ranks, see
        :func:`jaxcomm.psum`: sums of gradients too, if the calls that they are the
        gradients of were traced in the block. None leaves it as it is outside.

    Raises:
      TypeError: if reproducible is not True, False or None.
      ValueError: if there is no such backend, or the lane is no name.

    Example:
      Compare a whole program with XLA's collectives:

      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.psum(x, "i"), in_specs=jax.P("i"), out_specs=jax.P()
      ... )
      >>> with jaxcomm.using(backend="xla"):
      ...     jax.jit(f)(jnp.arange(4.0))
      Array([6.], dtype=float32)
    """
    if backend is not None and backend not in NAMES:
        raise ValueError(
            f"using: backend {backend!r} is unknown; choose one of {NAMES}, or None"
        )
    if lane is not None:
        check_lane(lane, "using: lane")
    outer = SCOPE.value
    scope = Scope(
        outer.backend if backend is None else backend,
        outer.lane if lane is None else lane,
        chosen_reproducible(reproducible, "using"),
        outer.part_of,
    )
    with SCOPE(scope):
        yield


def chosen_reproducible(asked: bool | None, name: str) -> bool:
    """Return ``reproducible`` of the function ``name``, or of the scope if None."""
    if asked is None:
        return SCOPE.value.reproducible
    if not isinstance(asked, (bool, np.bool_)):
        raise TypeError(
            f"{name}: reproducible must be True, False or None, known when the program "
            f"is traced, got {asked!r}"
        )
    return bool(asked)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a collective, checked. Primitives carry it as their ``call``.

    Attributes:
      name: what the user called, for messages.
      axes: the axis names, in the order that numbers the ranks.
      index_groups: ``axis_index_groups`` as nested tuples, or None.
      given: how operands are typed over ``axes``: ``"varying"``, or ``"unreduced"``
        for terms of a sum that is still to be taken.
      to: how results are typed over ``axes``; ``"invarying"`` and ``"reduced"``
        results are equal on all ranks.
      lane: the lane to use. None for the default lane.
      backend: the backend to use. None for the one that lowering finds.
      reproducible: whether bits must not depend on the number of ranks.
      part_of: the function that the call is a part of, with the options that all ranks
        must have alike: ranks compare this text. Empty of a call by itself.
    """

    name: str
    axes: tuple[str, ...]
    index_groups: IndexGroups = None
    given: Literal["varying", "unreduced"] = "varying"
    to: Literal["varying", "invarying", "reduced"] = "varying"
    lane: str | None = None
    backend: str | None = None
    reproducible: bool = False
    part_of: str = ""

    @property
    def scope(self) -> Scope:
        """The scope in which other calls are carried as this one is."""
        return Scope(self.backend, self.lane, self.reproducible, self.part_of)

    @property
    def is_portable(self) -> bool:
        """Whether XLA communicates, whatever the devices are.

        So it is without the extension, unless somebody chose another backend. Lowering
        then refuses.
        """
        is_left = self.backend is None and config.BACKEND is None
        return self.backend == "xla" or (is_left and bool(ABSENCE))

    @property
    def where(self) -> str:
        """What messages call it, as ``psum over ('i',)``."""
        return f"{self.name} over {self.axes}"

    def in_profiles(self, avals: Sequence) -> str:
        """Return what profiles call it: with its axes, and one rank's bytes.

        XLA names the instruction by it, with ``_`` in place of all but letters and
        digits. A gradient has the name of the call that it is the gradient of.

        >>> x = jax.ShapeDtypeStruct((1024, 128), "float32")
        >>> Call("psum", ("data", "context")).in_profiles([x])
        'jaxcomm.psum data,context 512KiB'
        """
        size, unit = sum(aval.size * aval.dtype.itemsize for aval in avals), "B"
        # A whole number: XLA would replace the point, too.
        for larger in ("KiB", "MiB", "GiB"):
            if size >= 10 << 10 or (size and size % 1024 == 0):
                size, unit = round(size / 1024), larger
        return f"jaxcomm.{self.name} {','.join(map(str, self.axes))} {size}{unit}"

    @property
    def invariant(self) -> bool:
        """Whether results are typed as equal on all ranks."""
        return self.to == "invarying"

    @property
    def axes_size(self) -> int:
        """The number of ranks along the axes."""
        return math.prod(compat.axis_size(axis) for axis in self.axes)

    @property
    def group_size(self) -> int:
        """The number of ranks of a group."""
        if self.index_groups is None:
            return self.axes_size
        sizes = {len(group) for group in self.index_groups}
        if len(sizes) > 1:
            raise ValueError(
                f"axis_index_groups must all be of one size here, got "
                f"{self.index_groups}"
            )
        return sizes.pop()

    @property
    def largest_group(self) -> int:
        """The number of ranks of the largest group."""
        groups = self.index_groups
        return self.axes_size if groups is None else max(map(len, groups))

    @property
    def result_size(self) -> int | None:
        """The group size, or None if groups differ in size."""
        groups = self.index_groups
        if groups is not None and len({len(group) for group in groups}) > 1:
            return None
        return self.group_size

    def replace(self, **changes: Any) -> "Call":
        """Return a copy with some attributes changed.

        >>> Call("psum", ("i",)).replace(lane="other").lane
        'other'
        """
        return dataclasses.replace(self, **changes)

    def plain(self, name: str) -> "Call":
        """Return a call of this package in place of this one, or as a part of it."""
        return self.replace(name=name, index_groups=None, given="varying", to="varying")

    def lacking(self, x: jax.Array) -> tuple[str, ...]:
        """Return the axes over which an operand is still to be typed as varying."""
        if self.given != "varying" or not compat.checks_varying_axes():
            return ()
        varying = compat.varying_axes(x)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(a for a in self.axes if a in manual and a not in varying)

    def typed(self, avals: Sequence, outs: Sequence) -> list:
        """Return the results' types, over the axes of the call and over all others.

        Args:
          avals: the operands' types.
          outs: the results' types so far, as many as operands or fewer.

        Raises:
          ValueError: if an operand has a type that the call does not take.
        """
        axes = frozenset(self.axes)
        for aval in avals:
            self.check_kind(aval)
        each = list(map(compat.varying_axes, avals))
        every = frozenset().union(*each)
        found = []
        for i, out in enumerate(outs):
            kinds = compat.kinds_of(out)
            mine = each[i] if len(outs) == len(avals) else every
            changes = {"varying": mine - axes if self.to != "varying" else mine}
            if self.given == "unreduced":
                changes["unreduced"] = kinds.unreduced - axes
                if self.to == "varying":
                    changes["varying"] |= axes
            if self.to == "reduced":
                changes["reduced"] = kinds.reduced | axes
            found.append(compat.with_manual_axes(out, **changes))
        return found

    def check_kind(self, aval) -> None:
        """Raise ValueError if an operand is typed otherwise than the call takes it."""
        axes, kinds = frozenset(self.axes), compat.kinds_of(aval)
        if self.given == "unreduced":
            if not axes <= kinds.unreduced:
                raise ValueError(
                    f"{self.where}: the operand must be unreduced over all of these "
                    f"axes, got {compat.type_text(aval)}"
                )
            if not compat.is_unreduced_sum(aval):
                raise ValueError(
                    f"{self.where}: jaxcomm adds unreduced operands, and this one is "
                    f"unreduced in another way, got {compat.type_text(aval)}. Use "
                    f"jax.lax"
                )
            return
        both = (kinds.unreduced | kinds.reduced) & axes
        if both:
            raise ValueError(
                f"{self.where}: the operand is unreduced or reduced over "
                f"{tuple(sorted(both))}, got {compat.type_text(aval)}. Sum unreduced "
                f"operands by jaxcomm.psum or jaxcomm.psum_scatter; type reduced ones "
                f"as varying by jaxcomm.pcast."
            )


def call_of(
    name: str,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
    lane: str | None = None,
    backend: str | None = None,
    reproducible: bool | None = None,
) -> Call:
    """Check the arguments that all collectives share, for the function ``name``.

    Raises:
      NameError: if an axis is not bound.
      TypeError: if groups are not sequences of integers, or reproducible is not True,
        False or None.
      ValueError: if groups do not hold every index exactly once, the lane is no name,
        or there is no such backend.
    """
    axes = replica_groups.canonical_axes(axis_name)
    compat.check_axes_bound(axes, name)
    if lane is not None:
        check_lane(lane, f"{name} over {axes}: lane")
    if backend is not None:
        check_name(backend)
    scope = SCOPE.value
    backend = scope.backend if backend is None else backend
    if backend is None and config.BACKEND == "xla":
        backend = "xla"  # So that the program is portable, see collective.py.
    lane = scope.lane if lane is None else lane
    is_reproducible = chosen_reproducible(reproducible, name)
    call = Call(
        name, axes, lane=lane, backend=backend, reproducible=is_reproducible,
        part_of=scope.part_of,
    )  # fmt: skip
    if axis_index_groups is None:
        return call
    return call.replace(index_groups=_index_groups(axis_index_groups, call))


def _index_groups(axis_index_groups, call: Call) -> replica_groups.IndexGroups:
    try:
        groups = [[as_index(index) for index in group] for group in axis_index_groups]
    except TypeError:
        raise TypeError(
            f"{call.where}: axis_index_groups must be sequences of integers "
            f"known when the program is traced, such as [[0, 1], [2, 3]], got "
            f"{axis_index_groups!r}"
        ) from None
    return replica_groups.canonical_index_groups(groups, call.axes_size)


def check_array(value, what: str) -> None:
    """Raise TypeError, which calls it ``what``, if JAX takes it for no array.

    JAX has arrays of numbers, truth values and random keys.
    """
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
    found = type(value).__name__
    if isinstance(value, kinds):
        try:
            jax.typeof(value)
        except TypeError:
            found = f"{found} of dtype {getattr(value, 'dtype', 'object')}"
        else:
            return
    raise TypeError(f"{what} must be an array, got {found}")


def as_index(value) -> int:
    """Return an integer, or raises TypeError, for a truth value too."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
