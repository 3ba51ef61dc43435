"""Maps of a recurrent state: S becomes A S + B, for each sequence and head."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import compat


class StateMap(NamedTuple):
    """What a piece of a sequence does to the state before it: S becomes A S + B.

    A document that begins inside forgets all before it: then A is 0.

    Attributes:
      factor: A, (..., N, K, K) in the dtype of sums. Or its diagonal, (..., N, K), or
        (..., N, 1) if that is one number.
      addend: B, (..., N, K, V), in the dtype of sums.
    """

    factor: Any
    addend: Any

    def then(self, after: "StateMap") -> "StateMap":
        """Return the map of this piece and the piece after it."""
        product = apply if self.is_matrix else jnp.multiply
        return StateMap(
            product(after.factor, self.factor),
            apply(after.factor, self.addend) + after.addend,
        )

    @property
    def is_matrix(self) -> bool:
        """Whether the factors are whole matrices."""
        return self.factor.ndim == self.addend.ndim

    def mirrored(self, addend: Any) -> "StateMap":
        """Return the map of the gradient, from behind the piece to before it."""
        factor = self.factor
        if self.is_matrix:
            factor = jnp.swapaxes(factor, -1, -2)
        return StateMap(factor, addend)


def apply(factor, state):
    """Return A S, with all digits of the dtype."""
    if factor.ndim < state.ndim:
        return factor[..., None] * state
    return jnp.matmul(factor, state, precision="highest")


def composed(maps: StateMap, begins=None) -> StateMap:
    """Return the map of pieces in a row up to each.

    Args:
      maps: of the pieces, which dimension 0 counts.
      begins: bool (pieces, B), where the row begins anew; B is dimension 1 of the maps.
    """

    def step(before, of):
        of, is_new = of
        both = before.then(of)
        if is_new is not None:
            both = StateMap(*map(functools.partial(chosen, is_new), of, both))
        return both, both

    first = jax.tree.map(lambda x: x[0], maps)
    rest = jax.tree.map(lambda x: x[1:], (maps, begins))
    _, others = jax.lax.scan(step, first, rest)
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, others)


def states(maps: StateMap, entering, begins=None) -> tuple[Any, Any]:
    """Return the state before each piece of a row, and the one behind it.

    Args:
      maps: of the pieces.
      entering: the state before the row; or, with ``begins``, the one before each piece
        if the row begins there.
      begins: as of :func:`composed`.
    """
    start = entering if begins is None else entering[0]

    def step(state, of):
        of, is_new, new = of
        if is_new is not None:
            state = chosen(is_new, new, state)
        behind = apply(of.factor, state) + of.addend
        return behind, (state, behind)

    of = maps, begins, None if begins is None else entering
    return jax.lax.scan(step, start, of)[1]


def chosen(flags, x, other=0):
    """Return an array where a flag (...) is True, and another elsewhere."""
    return jnp.where(
        flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim)), x, other
    )


def varying_like(x, reference):
    """Return an array typed as varying wherever another is."""
    axes = compat.varying_axes(reference) - compat.varying_axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
