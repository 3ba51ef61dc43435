"""Reads the collectives of a function, without any device.

The function is traced for an abstract mesh. A ``scan`` counts its body as often as it
runs, and so does a ``while`` that counts from one number to another. Another ``while``
counts once, and the plan says so. A ``cond`` counts the branch that sends most.
Collectives whose results nobody uses do not count: they are not in the compiled program
either.
"""

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core

from jaxcomm import compat
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import RowMover
from jaxcomm.communicator.replica_groups import canonical_axes
from jaxcomm.planning.calls import TracedCall, bytes_of, sent_bytes, written
from jaxcomm.planning.turns import Known, remember, turns
from jaxcomm.primitives import lowering
from jaxcomm.primitives.collective import COLLECTIVES
from jaxcomm.primitives.registry import Bind, Served

# How often each collective runs.
Counted = collections.Counter[TracedCall]

# JAX's collectives. The start of one is called the same with _start.
_OF_XLA = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all_reduce"),
    **dict.fromkeys(("unreduced_psum", "unreduced_pmax"), "all_reduce"),
    **dict.fromkeys(("all_gather_invariant", "all_gather_reduced"), "all_gather"),
    "unreduced_pmin": "all_reduce",
    "unreduced_reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    # Called as the planner's.
    **{
        name: name
        for name in ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all")
    },
}
# What names mesh axes too, and moves nothing.
_MOVE_NOTHING = {"axis_index", "pvary", "preduced", "vary_unreduced_cast"}
# Collectives before one, of the same function, that are looked at for independence.
_MOST_BESIDE = 64
_IN_A_WHILE = (
    "a while loop's collectives count once: how often it runs is not known before"
)
_LEFT_TO_XLA = (
    "XLA's collectives serve a shard_map that leaves axes {axes} to XLA; operands "
    "count whole, because how XLA splits them is not known before"
)
_UNKNOWN = (
    "{name} over axes {axes} is a collective that is not known here, and counts 0"
)


class Reader:
    """Reads the collectives of jaxprs.

    Attributes:
      notes: what is not known of them, in words.
      beside: pairs of which neither needs the other's result.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        platform: str,
        backend_of: Callable[[tuple[str, ...], Any, str | None], str],
        row_mover: Callable[[tuple[str, ...], Any], RowMover | None],
    ):
        """Read for a mesh of these axes.

        Args:
          sizes: of the axes.
          platform: of the devices, by which attention chooses a strategy.
          backend_of: what serves axes and index groups, given what the user chose.
          row_mover: of these, :func:`~jaxcomm.communicator.policy.row_mover`.
        """
        self.notes: set[str] = set()
        self.beside: set[tuple[TracedCall, TracedCall]] = set()
        self._sizes, self._platform = sizes, platform
        # The axes that the shard_map being read leaves to XLA.
        self._automatic: tuple[str, ...] = ()
        self._mesh = compat.abstract_mesh(sizes, platform)
        self._backend_of, self._row_mover = backend_of, row_mover

    def read(self, function: Callable, args: tuple) -> Counted:
        """Trace a function and count its collectives.

        It may be a program over global arrays that holds a ``jax.shard_map``, or what
        one device does, with arguments of one device.

        Raises:
          ValueError: if a collective is over an axis that the mesh does not have.
        """
        # The mesh that the user has set is not the one that is planned.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return self._read(function, args)

    def _read(self, function: Callable, args: tuple) -> Counted:
        try:
            return self._of(compat.traced(function, args))
        except (NameError, ValueError) as error:
            without_mesh = error
        try:
            with jax.sharding.use_abstract_mesh(self._mesh):
                return self._of(compat.traced(function, args))
        except NameError:
            return self._of_device(function, args)
        except ValueError as error:
            # It names a mesh of its own, and something else was wrong.
            is_about_mesh = "context mesh" in str(error)
            raise (without_mesh if is_about_mesh else error) from None

    def _of_device(self, function: Callable, args: tuple) -> Counted:
        """Count the collectives of what one device does."""
        every = jax.P()
        of_device = jax.shard_map(
            function, in_specs=every, out_specs=every, check_vma=False
        )
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._of(compat.traced(of_device, args))

    def _of(self, jaxpr) -> Counted:
        found: Counted = collections.Counter()
        # The collectives so far, and which of them each variable depends on, as bits.
        earlier: list[Counted] = []
        behind: dict[Any, int] = {}
        known: Known = {}
        for equation in jaxpr.eqns:
            mine = self._of_equation(equation, known)
            remember(equation, known)
            found.update(mine)
            needs = 0
            for each in equation.invars:
                if not isinstance(each, jax.extend.core.Literal):
                    needs |= behind.get(each, 0)
            if mine:
                for i, other in enumerate(earlier[-_MOST_BESIDE:]):
                    at = max(0, len(earlier) - _MOST_BESIDE) + i
                    if not needs >> at & 1:
                        self.beside |= {(a, b) for a in other for b in mine}
                needs |= 1 << len(earlier)
                earlier.append(mine)
            behind.update(dict.fromkeys(equation.outvars, needs))
        return found

    def _of_equation(self, equation, known: Known) -> Counted:
        name, params = equation.primitive.name, equation.params
        if equation.primitive in _ours():
            return self._of_ours(equation, *_ours()[equation.primitive])
        if name.removesuffix("_start") in _OF_XLA:
            return self._of_xla(equation)
        if name == "scan":
            return _times(self._of(params["jaxpr"].jaxpr), params["length"])
        if name == "cond":
            branches = [self._of(each.jaxpr) for each in params["branches"]]
            return max(branches, key=self._sent_bytes)
        if name == "shard_map":
            return self._of_shard_map(params)
        inner = list(_inner(params))
        if not inner:
            self._note_unknown(equation)
        found: Counted = collections.Counter()
        for each in inner:
            found.update(self._of(each))
        if name == "while" and found:
            count = turns(equation, known)
            if count is not None:
                return _times(found, count)
            self.notes.add(_IN_A_WHILE)
        return found

    def _of_shard_map(self, params: dict[str, Any]) -> Counted:
        mesh = params["mesh"]
        self._check_mesh(dict(mesh.shape))
        # One within another has a mesh whose outer axes are manual already.
        manual = {*params["newly_manual_axes"], *mesh.manual_axes}
        outer = self._automatic
        self._automatic = tuple(
            axis
            for axis, size in self._sizes.items()
            if size > 1 and axis not in manual
        )
        found = self._of(params["jaxpr"])
        self._automatic = outer
        return found

    def _note_unknown(self, equation) -> None:
        """Note a primitive that names mesh axes: it may communicate."""
        name, params = equation.primitive.name, equation.params
        if name in _MOVE_NOTHING or name.endswith("_done"):
            return
        named = set(_axes_of(params)) & self._sizes.keys()
        for axis in self._sizes:
            if compat.named_axis_effects([axis]) & equation.effects:
                named.add(axis)
        if named:
            self.notes.add(_UNKNOWN.format(name=name, axes=tuple(sorted(named))))

    def _of_ours(self, equation, collective, is_done) -> Counted:
        if is_done:
            return collections.Counter()
        params = dict(equation.params)
        call = params.pop("call")
        params.pop("paired", None)
        avals = [each.aval for each in equation.invars]
        self._check(call.axes, call.name)
        asked = call.backend
        size = self._group_size(call)
        if size == 1:
            return collections.Counter()
        if self._automatic:
            asked = "xla"  # As lowering does.
            self.notes.add(_LEFT_TO_XLA.format(axes=self._automatic))
        backend = self._backend_of(call.axes, call.index_groups, asked)
        mover = self._row_mover(call.axes, call.index_groups)
        served = Served(backend, self._platform, size, mover)
        replacement = lowering.replacement_of(served, collective, avals, call, params)
        if replacement is not None:
            return self._of_replacement(replacement, call, backend, avals)
        return self._once(
            avals,
            collective.sent(avals),
            name=call.name.removesuffix("_start"),
            collective=collective.planner,
            axes=call.axes,
            index_groups=call.index_groups,
            lane=call.lane or DEFAULT_LANE,
            backend=backend,
            is_ours=backend != "xla",
            is_split=call.name.endswith("_start") or backend == "xla",
        )

    def _of_replacement(self, replacement, call, backend, avals) -> Counted:
        """Read what the lowering puts in the place of a collective."""
        call = call.replace(backend=backend, given="varying", to="varying")
        xs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return self._of_device(
            lambda *xs: tuple(replacement(Bind(call), xs)), tuple(xs)
        )

    def _of_xla(self, equation) -> Counted:
        params, name = equation.params, equation.primitive.name
        axes = _axes_of(params)
        index_groups = params.get("axis_index_groups")
        if index_groups is not None:
            index_groups = tuple(map(tuple, index_groups))
        self._check(axes, name)
        if self._automatic and any(self._sizes[axis] > 1 for axis in axes):
            self.notes.add(_LEFT_TO_XLA.format(axes=self._automatic))
        avals = [each.aval for each in equation.invars]
        collective = _OF_XLA[name.removesuffix("_start")]
        ours = COLLECTIVES.get(collective)
        return self._once(
            avals,
            avals if ours is None else ours.sent(avals),
            name=f"lax.{name}",
            collective=collective,
            axes=axes,
            index_groups=index_groups,
            lane=DEFAULT_LANE,
            backend="xla",
            is_ours=False,
            is_split=True,
        )

    def _once(self, avals, sent, **facts: Any) -> Counted:
        """Count a call; in groups of one rank nothing is sent."""
        sizes = {"bytes": bytes_of(avals), "travelling_bytes": bytes_of(sent)}
        call = TracedCall(operands=written(avals), **sizes, **facts)
        return collections.Counter([call] if self._group_size(call) > 1 else [])

    def _sent_bytes(self, counted: Counted) -> float:
        return sum(
            times
            * sent_bytes(call.collective, self._group_size(call), call.travelling_bytes)
            for call, times in counted.items()
        )

    def _group_size(self, call) -> int:
        """Return the ranks of the largest group."""
        if call.index_groups is not None:
            return max(map(len, call.index_groups))
        return math.prod(self._sizes[axis] for axis in call.axes)

    def _check_mesh(self, found: dict[str, int]) -> None:
        if any(self._sizes.get(axis) != size for axis, size in found.items()):
            raise ValueError(
                f"plan: the function's shard_map is over a mesh of {found}, and the "
                f"plan is for {self._sizes}. Give plan the mesh of the function, or "
                f"the function no mesh"
            )

    def _check(self, axes, name) -> None:
        for axis in axes:
            if axis not in self._sizes:
                raise ValueError(
                    f"plan: {name} over axis {axis!r}, which the mesh does not have: "
                    f"its axes are {tuple(self._sizes)}"
                )


def _axes_of(params: dict[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes that a primitive's parameters name as JAX's do."""
    axes = canonical_axes(params.get("axes", params.get("axis_name", ())))
    return tuple(axis for axis in axes if isinstance(axis, str))


_known: dict[Any, tuple[Any, bool]] = {}


def _ours() -> dict[Any, tuple[Any, bool]]:
    """Return the collective of each primitive, and whether it is the done of a pair."""
    if not _known:
        for collective in COLLECTIVES.values():
            pair = getattr(collective, "pair", None)
            primitives = [(collective.primitive, False)]
            if pair is not None:
                primitives += [(pair.start, False), (pair.done, True)]
            for primitive, is_done in primitives:
                for each in (primitive, getattr(primitive, "portable")):  # noqa: B009
                    _known[each] = collective, is_done
    return _known


def _times(found: Counted, times: int) -> Counted:
    counted = {call: times * count for call, count in found.items()}
    return collections.Counter(counted if times else {})


def _inner(params: dict[str, Any]) -> Iterator:
    """Yield the jaxprs in the parameters of an equation."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, jax.extend.core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, jax.extend.core.Jaxpr):
                yield each
