"""Maps of a recurrent state: S becomes A S + B, for each sequence and head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import compat

# Steps that are one program without a loop: a step is a few small products.
_UNROLLED = 8


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
        if not is_matrix(after):
            factor = after.factor * self.factor
            return StateMap(factor, apply(after.factor, self.addend) + after.addend)
        size = self.factor.shape[-1]
        both = apply(after.factor, jnp.concatenate(self, -1))
        return StateMap(both[..., :size], both[..., size:] + after.addend)

    def mirrored(self, addend: Any) -> "StateMap":
        """Return the map of the gradient, from behind the piece to before it."""
        factor = self.factor
        if is_matrix(self):
            factor = jnp.swapaxes(factor, -1, -2)
        return StateMap(factor, addend)


def is_matrix(of: StateMap) -> bool:
    """Say whether the factors are whole matrices."""
    return of.factor.ndim == of.addend.ndim


def apply(factor, state):
    """Return A S, with all digits of the dtype."""
    if factor.ndim < state.ndim:
        return factor[..., None] * state
    return jnp.matmul(factor, state, precision="highest")


def composed(maps: StateMap, begins=None) -> tuple[StateMap, StateMap]:
    """Return the map of pieces in a row up to each, and of all.

    Args:
      maps: of the pieces, which dimension 0 counts.
      begins: bool (pieces, B), where the row begins anew; B is dimension 1 of the maps.
    """
    first, rest = (
        jax.tree.map(lambda x, at=at: x[at], maps) for at in (slice(1), slice(1, None))
    )

    def step(before, of):
        of, is_new = of
        both = before.then(of)
        if is_new is not None:
            both = jax.tree.map(
                lambda x, y: jnp.where(_like(is_new, x), x, y), of, both
            )
        return both, both

    rest = rest, None if begins is None else begins[1:]
    before = jax.tree.map(lambda x: x[0], first)
    last, others = jax.lax.scan(step, before, rest, unroll=_UNROLLED)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), first, others), last


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
            state = jnp.where(_like(is_new, state), new, state)
        behind = apply(of.factor, state) + of.addend
        return behind, (state, behind)

    of = maps, begins, None if begins is None else entering
    return jax.lax.scan(step, start, of, unroll=_UNROLLED)[1]


def _like(flags, x):
    """Return flags (...) with as many dimensions as an array."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))


def zeros_unless(flags, x):
    """Return zeros where a flag (...) is False."""
    return jnp.where(_like(flags, x), x, 0)


def reversed_pieces(tree):
    """Return pieces from the last to the first."""
    return jax.tree.map(lambda x: x[::-1], tree)


def varying_like(x, reference):
    """Return an array typed as varying wherever another is."""
    axes = compat.varying_axes(reference) - compat.varying_axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
