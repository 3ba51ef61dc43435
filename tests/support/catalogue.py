"""Every collective once: how it is called, what it should give, and what it is.

Tests over "every collective" take their cases from here. ``test_catalogue.py`` fails if
a public collective has no case.
"""

from typing import Any

import jax
import jax.numpy as jnp
import models
from collective_case import Case, ragged_model
from collective_case import drawn as drawn
from collective_case import fixed as fixed

import jaxcomm


def _reductions() -> list[Case]:
    def of(op):
        return lambda c: models.all_reduce(op)

    def on_root(op, root):
        return lambda c: models.only_on(root(c), models.all_reduce(op))

    def last(c):
        return c.root

    def first(c):
        return 0

    whole = {"target": "all_reduce", "shared": True}
    return [
        Case("psum", "psum", "sum", of("sum"), twin=True, lax_grad=True, **whole),
        Case(
            "pmean", "pmean", "mean", lambda c: models.mean,
            twin=True, lax_grad=True, **whole,
        ),
        Case("pmax", "pmax", "extreme", of("max"), twin=True, **whole),
        Case("pmin", "pmin", "extreme", of("min"), twin=True, **whole),
        Case("pprod", "pprod", "product", of("prod"), **whole),
        Case(
            "preduce", "preduce", "sum", on_root("sum", last),
            lambda c: {"root": c.root}, "reduce",
        ),
        Case(
            "preduce_max", "preduce", "extreme", on_root("max", first),
            lambda c: {"op": "max"}, "reduce",
        ),
        Case(
            "preduce_prod", "preduce", "product", on_root("prod", last),
            lambda c: {"root": c.root, "op": "prod"}, "reduce",
        ),
        Case(
            "psum_scatter", "psum_scatter", "sum", lambda c: models.reduce_scatter(),
            target="reduce_scatter", twin=True, lax_grad=True,
        ),
        Case(
            "psum_scatter_tiled", "psum_scatter", "sum",
            lambda c: models.reduce_scatter(1, tiled=True),
            lambda c: {"scatter_dimension": 1, "tiled": True}, "reduce_scatter",
            twin=True, lax_grad=True, cuts_columns=True,
        ),
    ]  # fmt: skip


def _scans() -> list[Case]:
    def scan(name, kind, **arguments):
        return Case(
            name,
            "pscan",
            kind,
            lambda c: models.scan(**arguments),
            lambda c: arguments,
            "scan",
        )

    return [
        scan("pscan", "sum"),
        scan("pscan_back", "sum", exclusive=True, reverse=True),
        scan("pscan_min", "extreme", op="min", exclusive=True),
        scan("pscan_prod", "product", op="prod", reverse=True),
    ]


def _gathers() -> list[Case]:
    return [
        Case(
            "all_gather", "all_gather", "move", lambda c: models.all_gather(1),
            lambda c: {"axis": 1}, "all_gather", twin=True, lax_grad=True,
        ),
        Case(
            "all_gather_tiled", "all_gather", "move",
            lambda c: models.all_gather(-1, tiled=True),
            lambda c: {"axis": -1, "tiled": True}, "all_gather",
            twin=True, lax_grad=True,
        ),
        Case(
            "pgather", "pgather", "move",
            lambda c: models.only_on(c.root, models.all_gather(1)),
            lambda c: {"root": c.root, "axis": 1}, "gather",
        ),
        Case(
            "pgather_tiled", "pgather", "move",
            lambda c: models.only_on(0, models.all_gather(0, tiled=True)),
            lambda c: {"tiled": True}, "gather",
        ),
        Case(
            "pbroadcast", "pbroadcast", "move", lambda c: models.broadcast(c.root),
            lambda c: {"source": c.root}, "broadcast",
        ),
        Case(
            "pscatter", "pscatter", "move", lambda c: models.scatter(c.root),
            lambda c: {"root": c.root}, "scatter",
        ),
        Case(
            "pscatter_tiled", "pscatter", "move",
            lambda c: models.scatter(0, 1, tiled=True),
            lambda c: {"axis": 1, "tiled": True}, "scatter", cuts_columns=True,
        ),
    ]  # fmt: skip


def _exchanges() -> list[Case]:
    return [
        Case(
            # The gradient of jax.lax's has another shape.
            "all_to_all", "all_to_all", "move", lambda c: models.all_to_all(0, 1),
            lambda c: {"split_axis": 0, "concat_axis": 1}, "all_to_all", twin=True,
        ),
        Case(
            "all_to_all_tiled", "all_to_all", "move",
            lambda c: models.all_to_all(0, 1, tiled=True),
            lambda c: {"split_axis": 0, "concat_axis": 1, "tiled": True},
            "all_to_all", twin=True, lax_grad=True,
        ),
        Case(
            "all_to_all_columns", "all_to_all", "move",
            lambda c: models.all_to_all(1, 0, tiled=True),
            lambda c: {"split_axis": 1, "concat_axis": 0, "tiled": True},
            "all_to_all", twin=True, lax_grad=True, cuts_columns=True,
        ),
        Case(
            "pswapaxes", "pswapaxes", "move", lambda c: models.all_to_all(0, 0),
            lambda c: {"axis": 0}, "all_to_all", twin=True, lax_grad=True,
        ),
        Case(
            "ragged_all_to_all", "ragged_all_to_all", "move", ragged_model,
            target="ragged_all_to_all",
        ),
    ]  # fmt: skip


def _permutations() -> list[Case]:
    def shift(c):
        return models.permute([(r, (r + c.shift) % c.size) for r in range(c.size)])

    def shuffle(c):
        return models.permute([(s, t) for t, s in enumerate(c.order)])

    sent: dict[str, Any] = {
        "target": "permute", "twin": True, "lax_grad": True, "in_mesh_order": True,
    }  # fmt: skip
    return [
        Case(
            "ppermute", "ppermute", "move", lambda c: models.permute(c.ring),
            lambda c: {"perm": c.ring}, **sent,
        ),
        Case(
            "ppermute_some", "ppermute", "move", lambda c: models.permute(c.pairs),
            lambda c: {"perm": c.pairs}, **sent,
        ),
        Case(
            "pshuffle", "pshuffle", "move", shuffle,
            lambda c: {"perm": c.order}, **sent,
        ),
        Case(
            "ring_shift", "ring_shift", "move", shift,
            lambda c: {"shift": c.shift}, "permute",
        ),
        Case("pbarrier", "pbarrier", "move", lambda c: models.whole, target="barrier"),
    ]  # fmt: skip


CASES = {
    case.name: case
    for family in (_reductions, _scans, _gathers, _exchanges, _permutations)
    for case in family()
}
# It moves nothing and needs an operand that is equal on all ranks.
PCAST = Case(
    "pcast", "pcast", "move", lambda c: models.whole, lambda c: {"to": "varying"}
)
# One case of each function, and pcast.
FUNCTIONS = {case.function: case for case in reversed([*CASES.values(), PCAST])}
# One of each function and kind.
KINDS = {
    case.name: case
    for case in {(c.function, c.kind): c for c in reversed(CASES.values())}.values()
}


def public_collectives() -> set[str]:
    """Return the names of all public functions that communicate."""
    return {
        name
        for name in jaxcomm.__all__
        if getattr(getattr(jaxcomm, name), "__module__", "").startswith(
            "jaxcomm.collectives."
        )
    }


def between(start):
    """Return a start and a done with a computation between them, as one function."""

    def call(x, *args, after=True, **options):
        handle = start(x, *args, **options)
        meanwhile = jax.tree.map(
            lambda leaf: jnp.sin(leaf) if leaf.dtype == jnp.float32 else leaf == leaf, x
        )
        return handle.done(after=meanwhile if after else None)

    return call


class _SplitPhase:
    """The names of jaxcomm, each as a start and a done."""

    def __getattr__(self, name):
        return between(getattr(jaxcomm, f"{name}_start"))


SPLIT_PHASE = _SplitPhase()
