"""Every collective once: how it is called, what it should give, and what is true of it.

Tests over "every collective" take their cases from here. ``test_meshes.py`` fails if
a public collective has no case. An operand has shape (size, columns, ...) on each of
``size`` ranks; cases with ``cuts_columns`` want columns to be a multiple of the size.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import models
import numpy as np
from models import all_gather, all_reduce, all_to_all, only_on, permute, reduce_scatter

import jaxcomm


@dataclasses.dataclass(frozen=True)
class Choice:
    size: int  # the number of ranks
    root: int  # which rank gives or gets all
    shift: int  # how far a ring is turned
    pairs: tuple[tuple[int, int], ...]  # an incomplete permutation
    order: tuple[int, ...]  # a complete one: the source of each rank

    def ring(self, shift: int = 1) -> list[tuple[int, int]]:
        """Pairs that send to the next rank, or one further on."""
        return [(rank, (rank + shift) % self.size) for rank in range(self.size)]


def fixed(size: int) -> Choice:
    """Return a choice in which most ranks send backwards; the last gets nothing."""
    pairs = tuple((rank, rank - 1) for rank in range(2, size))
    return Choice(size, size - 1, -3, pairs, (*range(1, size), 0))


def drawn(size: int, rng: np.random.Generator) -> Choice:
    """Return a choice at random, in which one rank gets nothing."""
    sources, targets = (rng.permutation(size).tolist() for _ in range(2))
    return Choice(
        size,
        root=int(rng.integers(size)),
        shift=int(rng.integers(1, size + 1)),
        pairs=tuple(zip(sources, targets, strict=True))[: size - 1],
        order=tuple(sources),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    name: str  # the public function's, perhaps with more behind it
    kind: Literal["move", "sum", "mean", "extreme", "product"]  # what elements undergo
    target: str  # the C++ planner that carries it out
    model: Callable[[Choice], Callable]  # gives a function of support/models.py
    arguments: Callable[[Choice], dict[str, Any]] = lambda choice: {}
    twin: bool = False  # jax.lax has the same function
    lax_grad: bool = False  # and differentiates it, and rightly
    cuts_columns: bool = False  # axis 1 must be a multiple of the size
    in_mesh_order: bool = False  # ranks count as in the mesh: jax.lax.ppermute's do
    shared: bool = False  # the result is typed as equal on all ranks

    def __call__(self, lib, x, axes, choice: Choice, **options):
        """Call the function of ``lib``: jaxcomm, jax.lax, or another with the names."""
        call = getattr(lib, self.function)
        if self.function == "ragged_all_to_all":
            return jax.tree.map(lambda x: _ragged(call, x, axes, choice, **options), x)
        return call(x, axis_name=axes, **self.arguments(choice), **options)

    @property
    def function(self) -> str:
        return max((n for n in jaxcomm.__all__ if self.name.startswith(n)), key=len)

    @property
    def takes_groups(self) -> bool:
        parameters = inspect.signature(getattr(jaxcomm, self.function)).parameters
        return "axis_index_groups" in parameters

    @property
    def starts(self) -> bool:
        return hasattr(jaxcomm, f"{self.function}_start")

    def of_types(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of ``x``, by dtype, whose dtypes it takes."""
        # An exclusive sum begins with a zero, which one type lacks.
        lacking = {"float8_e8m0fnu"} if self.name == "pscan_back" else ()
        return {dtype: leaf for dtype, leaf in x.items() if dtype not in lacking}


def _sends(choice):
    """Say who sends its row to whom: most ranks to most."""
    ranks = np.arange(choice.size)
    return (ranks[:, None] + ranks) % 3 != 1


def _ragged(call, x, axes, choice, **options):
    """Send row s to rank s, as its row r; in other rows leave twice the operand."""
    sends = _sends(choice).astype(np.int32)
    rows = jnp.arange(choice.size, dtype=jnp.int32)
    try:
        me = jax.lax.axis_index(axes)
    except NameError:
        me = 0  # Let the collective say so.
    groups = options.get("axis_index_groups")
    if groups is not None:
        ranks = [rank for group in groups for rank in group]
        places = [place for group in groups for place in range(len(group))]
        me = jnp.asarray(places)[np.argsort(ranks)][me]
    where = jnp.full_like(rows, 0) + me
    return call(
        x, x + x, rows, jnp.asarray(sends)[me], where, jnp.asarray(sends.T)[me],
        axis_name=axes, **options,
    )  # fmt: skip


def _ragged_model(choice):
    received = _sends(choice).T

    def model(group):
        xp = models.library_of(group)
        mask = received.reshape(received.shape + (1,) * (group.ndim - 2))
        return xp.where(mask, xp.swapaxes(group, 0, 1), group + group)

    return model


def scan_case(name, kind, **arguments):
    return Case(
        name, kind, "scan", lambda c: models.scan(**arguments), lambda c: arguments
    )


def _all_to_all(name, split, concat, tiled, **what):
    arguments = {"split_axis": split, "concat_axis": concat, "tiled": tiled}
    return Case(
        name, "move", "all_to_all", lambda c: all_to_all(split, concat, tiled),
        lambda c: arguments, twin=True, **what,
    )  # fmt: skip


_GRAD: dict[str, Any] = {"twin": True, "lax_grad": True}
_EQUAL: dict[str, Any] = {"target": "all_reduce", "shared": True}
_SENT: dict[str, Any] = _GRAD | {"target": "permute", "in_mesh_order": True}
_CASES = [
    Case("psum", "sum", model=lambda c: all_reduce("sum"), **_GRAD, **_EQUAL),
    Case("pmean", "mean", model=lambda c: models.mean, **_GRAD, **_EQUAL),
    Case("pmax", "extreme", model=lambda c: all_reduce("max"), twin=True, **_EQUAL),
    Case("pmin", "extreme", model=lambda c: all_reduce("min"), twin=True, **_EQUAL),
    Case("pprod", "product", model=lambda c: all_reduce("prod"), **_EQUAL),
    Case("preduce", "sum", "reduce", lambda c: only_on(c.root, all_reduce("sum")),
         lambda c: {"root": c.root}),
    Case("preduce_max", "extreme", "reduce", lambda c: only_on(0, all_reduce("max")),
         lambda c: {"op": "max"}),
    Case("preduce_prod", "product", "reduce",
         lambda c: only_on(c.root, all_reduce("prod")),
         lambda c: {"root": c.root, "op": "prod"}),
    Case("psum_scatter", "sum", "reduce_scatter", lambda c: reduce_scatter(), **_GRAD),
    Case("psum_scatter_tiled", "sum", "reduce_scatter",
         lambda c: reduce_scatter(1, True), cuts_columns=True, **_GRAD,
         arguments=lambda c: {"scatter_dimension": 1, "tiled": True}),
    scan_case("pscan", "sum"),
    scan_case("pscan_back", "sum", exclusive=True, reverse=True),
    scan_case("pscan_min", "extreme", op="min", exclusive=True),
    scan_case("pscan_prod", "product", op="prod", exclusive=True, reverse=True),
    Case("all_gather", "move", "all_gather", lambda c: all_gather(1),
         lambda c: {"axis": 1}, **_GRAD),
    Case("all_gather_tiled", "move", "all_gather", lambda c: all_gather(-1, True),
         lambda c: {"axis": -1, "tiled": True}, **_GRAD),
    Case("pgather", "move", "gather", lambda c: only_on(c.root, all_gather(1)),
         lambda c: {"root": c.root, "axis": 1}),
    Case("pgather_tiled", "move", "gather", lambda c: only_on(0, all_gather(0, True)),
         lambda c: {"tiled": True}),
    Case("pbroadcast", "move", "broadcast", lambda c: models.broadcast(c.root),
         lambda c: {"source": c.root}),
    Case("pscatter", "move", "scatter", lambda c: models.scatter(c.root),
         lambda c: {"root": c.root}),
    Case("pscatter_tiled", "move", "scatter", lambda c: models.scatter(0, 1, True),
         lambda c: {"axis": 1, "tiled": True}, cuts_columns=True),
    _all_to_all("all_to_all", 0, 1, False),  # jax.lax's gradient has another shape.
    _all_to_all("all_to_all_tiled", 0, 1, True, lax_grad=True),
    _all_to_all("all_to_all_columns", 1, 0, True, lax_grad=True, cuts_columns=True),
    Case("pswapaxes", "move", "all_to_all", lambda c: all_to_all(0, 0),
         lambda c: {"axis": 0}, **_GRAD),
    Case("ragged_all_to_all", "move", "ragged_all_to_all", _ragged_model),
    Case("ppermute", "move", model=lambda c: permute(c.ring()),
         arguments=lambda c: {"perm": c.ring()}, **_SENT),
    Case("ppermute_some", "move", model=lambda c: permute(c.pairs),
         arguments=lambda c: {"perm": c.pairs}, **_SENT),
    Case("pshuffle", "move", arguments=lambda c: {"perm": c.order}, **_SENT,
         model=lambda c: permute([(s, t) for t, s in enumerate(c.order)])),
    Case("ring_shift", "move", "permute", lambda c: permute(c.ring(c.shift)),
         lambda c: {"shift": c.shift}),
    Case("pbarrier", "move", "barrier", lambda c: models.whole),
]  # fmt: skip
CASES = {case.name: case for case in _CASES}
# It moves nothing and needs an operand that is equal on all ranks.
PCAST = Case("pcast", "move", "", lambda c: models.whole, lambda c: {"to": "varying"})
# One case of each function, and pcast.
FUNCTIONS = {case.function: case for case in reversed([*_CASES, PCAST])}
# One of each function and kind.
KINDS = {
    case.name: case
    for case in {(c.function, c.kind): c for c in reversed(_CASES)}.values()
}


class _SplitPhase:
    """The names of jaxcomm, each as a start and a done with a computation between."""

    def __getattr__(self, name):
        start = getattr(jaxcomm, f"{name}_start")

        def call(x, *args, after=True, **options):
            handle = start(x, *args, **options)
            meanwhile = jax.tree.map(
                lambda x: jnp.sin(x) if jnp.result_type(x) == jnp.float32 else x == x,
                x,
            )
            return handle.done(after=meanwhile if after else None)

        return call


SPLIT_PHASE = _SplitPhase()
