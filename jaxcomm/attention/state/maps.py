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

    def linked(self, is_linked: Any) -> "StateMap":
        """Return the map from a state that counts only where a flag (...) is True."""
        factor = self.factor
        is_linked = is_linked.reshape(
            is_linked.shape + (1,) * (factor.ndim - is_linked.ndim)
        )
        return self._replace(factor=jnp.where(is_linked, factor, 0))


def is_matrix(of: StateMap) -> bool:
    """Say whether the factors are whole matrices."""
    return of.factor.ndim == of.addend.ndim


def apply(factor, state):
    """Return A S, with all digits of the dtype."""
    if factor.ndim < state.ndim:
        return factor[..., None] * state
    return jnp.matmul(factor, state, precision="highest")


def composed(maps: StateMap) -> StateMap:
    """Return the map of pieces in a row: dimension 0 counts them."""
    if len(maps.addend) == 1:
        return jax.tree.map(lambda x: x[0], maps)
    first, rest = (
        jax.tree.map(lambda x, at=at: x[at], maps) for at in (0, slice(1, None))
    )

    def step(before, of):
        return before.then(of), None

    return jax.lax.scan(step, first, rest, unroll=_UNROLLED)[0]


def states(maps: StateMap, entering) -> tuple[Any, Any]:
    """Return the state before each piece of a row, and the state behind the last."""

    def step(state, of):
        return apply(of.factor, state) + of.addend, state

    end, before = jax.lax.scan(step, entering, maps, unroll=_UNROLLED)
    return before, end


def reversed_pieces(tree):
    """Return pieces from the last to the first."""
    return jax.tree.map(lambda x: x[::-1], tree)


def varying_like(x, reference):
    """Return an array typed as varying wherever another is."""
    axes = compat.varying_axes(reference) - compat.varying_axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
