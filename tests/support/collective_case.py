"""One way to call a collective, what it should give, and what is true of it.

An operand has shape (size, columns, ...) on each of ``size`` ranks. Some cases want
``columns`` to be a multiple of the size: those with ``cuts_columns``.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import models
import numpy as np

import jaxcomm

# It moves elements, adds them, averages, compares or multiplies them.
Kind = Literal["move", "sum", "mean", "extreme", "product"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a case is called with, besides its operand.

    Attributes:
      size: the number of ranks.
      root: which rank gives or gets all.
      shift: how far a ring is turned.
      pairs: an incomplete permutation.
      order: a complete one: the source of each rank.
    """

    size: int
    root: int
    shift: int
    pairs: tuple[tuple[int, int], ...]
    order: tuple[int, ...]

    @property
    def ring(self) -> list[tuple[int, int]]:
        """Pairs that send to the next rank."""
        return [(rank, (rank + 1) % self.size) for rank in range(self.size)]


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
    """One way to call a collective.

    Attributes:
      name: of the case.
      function: the public function's name.
      kind: what it does to elements.
      model: from a choice to a function of ``support/models.py``.
      arguments: from a choice to keyword arguments.
      target: the C++ planner that carries it out.
      twin: whether ``jax.lax`` has the same function.
      lax_grad: whether ``jax.lax`` also differentiates it, and rightly.
      cuts_columns: whether axis 1 must be a multiple of the size.
      in_mesh_order: ranks count in the mesh's order of axes, as ``jax.lax.ppermute``'s.
      shared: whether the result is typed as equal on all ranks.
    """

    name: str
    function: str
    kind: Kind
    model: Callable[[Choice], Callable]
    arguments: Callable[[Choice], dict[str, Any]] = lambda choice: {}
    target: str = ""
    twin: bool = False
    lax_grad: bool = False
    cuts_columns: bool = False
    in_mesh_order: bool = False
    shared: bool = False

    def __call__(self, lib, x, axes, choice: Choice, **options):
        """Call the function of ``lib``: jaxcomm, jax.lax, or another with the names."""
        call = getattr(lib, self.function)
        if self.function == "ragged_all_to_all":
            return jax.tree.map(lambda x: _ragged(call, x, axes, choice, **options), x)
        return call(x, axis_name=axes, **self.arguments(choice), **options)

    @property
    def linear(self) -> bool:
        """Whether it is a linear function of its operand."""
        return self.kind in ("move", "sum", "mean")

    @property
    def takes_groups(self) -> bool:
        """Whether it takes ``axis_index_groups``."""
        parameters = inspect.signature(getattr(jaxcomm, self.function)).parameters
        return "axis_index_groups" in parameters

    def of_types(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of ``x``, by dtype, whose dtypes it takes."""
        # An exclusive sum begins with a zero, which one type lacks.
        lacking = {"float8_e8m0fnu"} if self.name == "pscan_back" else ()
        return {dtype: leaf for dtype, leaf in x.items() if dtype not in lacking}

    @property
    def starts(self) -> bool:
        """Whether it can be had split-phase."""
        return hasattr(jaxcomm, f"{self.function}_start")


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


def ragged_model(choice):
    received = _sends(choice).T

    def model(group):
        xp = models.library_of(group)
        mask = received.reshape(received.shape + (1,) * (group.ndim - 2))
        return xp.where(mask, xp.swapaxes(group, 0, 1), group + group)

    return model
