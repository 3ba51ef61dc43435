"""Maps of a recurrent state: S becomes A S + B, for each sequence and head.

And one exchange: the state before each fragment, from what all fragments do to it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import psum
from jaxcomm.collectives.permute import ppermute
from jaxcomm.machine import Machine

# Whose numbers choose: a program is the same wherever it is traced.
_MACHINE = Machine.named("gpu")


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


class Sent(NamedTuple):
    """What a rank sends in an exchange, one way.

    Attributes:
      sends: collectives that follow one another.
      bytes: of all of them.
    """

    sends: int
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """Return how long it takes, by the numbers of a machine."""
        return self.bytes / machine.bytes_per_second + self.sends * machine.latency


def gathered(size: int, count: int, factor: int, addend: int) -> Sent:
    """Return what ranks send if each gathers the maps of all.

    Args:
      size: ranks.
      count: fragments of a rank.
      factor, addend: bytes of the two arrays of a fragment's map.
    """
    return Sent(1, (size - 1) * count * (factor + addend))


def by_steps(size: int, count: int, factor: int, addend: int) -> Sent:
    """Return what ranks send if maps are composed on the way, in steps of log2."""
    steps = (size - 1).bit_length() + 1
    # From one pass over the ranks to the next, the state behind it.
    between = (count - 1) * 2 * (size - 1) / size * addend
    return Sent(count * (steps + 1) - 1, steps * count * (factor + addend) + between)


def least_sent(size: int, count: int, factor: int, addend: int) -> Sent:
    """Return the quicker of both, for 64 heads of 128 in zigzag from 8 ranks on steps.

    By a model of H200s, which was not measured beyond four ranks.
    """
    of = size, count, factor, addend
    return min(gathered(*of), by_steps(*of), key=lambda sent: sent.seconds(_MACHINE))


def entering(maps: StateMap, order: tuple[int, ...], axis_name):
    """Return the state before each fragment of this rank.

    Args:
      maps: of this rank's fragments: dimension 0 counts them.
      order: of the fragments of all ranks, counted rank by rank. From the last to the
        first for gradients.
      axis_name: the axes that split the sequence.

    Returns:
      (F, ..., K, V). The first of all has a state of zeros.
    """
    size, count = jax.lax.axis_size(axis_name), len(maps.addend)
    each = size, count, *(x.nbytes // count for x in maps)
    if least_sent(*each) != gathered(*each) and _columns(order, size):
        return _composed_on_the_way(maps, order, axis_name)
    at = np.asarray(order)
    every = all_gather(maps, axis_name)
    every = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[at], every)
    start = varying_like(jnp.zeros_like(every.addend[0]), every.addend)
    before, _ = states(every, start)
    turns = jnp.asarray(np.argsort(order).reshape(size, -1))
    return before[turns[jax.lax.axis_index(axis_name)]]


def _columns(order, size: int) -> list[tuple[int, int]]:
    """Return the fragments by which the sequence passes all ranks; [] if it does not.

    Pairs: which fragment of each rank, and 1 if they ascend with the rank, else -1.
    """
    by_turn = np.asarray(order).reshape(-1, size)
    count, found = len(order) // size, []
    for turn in by_turn:
        ranks, which = np.divmod(turn, count)
        steps = np.diff(ranks)
        if len(set(which)) > 1 or not ((steps == 1).all() or (steps == -1).all()):
            return []
        found.append((int(which[0]), 1 if steps[0] == 1 else -1))
    return found


def _composed_on_the_way(maps: StateMap, order, axis_name):
    """Put maps together over 1, 2, 4, ... ranks, for each pass over the ranks.

    Source: Hillis and Steele, Data parallel algorithms, 1986.
    """
    size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    state = varying_like(jnp.zeros_like(maps.addend[0]), maps.addend)
    found = {}

    def arrived(of, by, step):
        pairs = [(r, r + step * by) for r in range(size)]
        return ppermute(of, axis_name, [p for p in pairs if 0 <= p[1] < size])

    for which, step in _columns(order, size):
        of = jax.tree.map(lambda x, which=which: x[which], maps)
        place = rank if step == 1 else size - 1 - rank

        by = 1
        while by < size:
            both = arrived(of, by, step).then(of)
            is_far = place >= by
            of = jax.tree.map(functools.partial(jnp.where, is_far), both, of)
            by *= 2
        before = arrived(of, 1, step)
        after_all = apply(before.factor, state) + before.addend
        found[which] = jnp.where(place == 0, state, after_all)
        if len(found) < len(order) // size:
            # The last rank of this pass has the state behind it.
            behind = apply(of.factor, state) + of.addend
            state = psum(jnp.where(place == size - 1, behind, 0), axis_name)
            state = varying_like(state, maps.addend)
    return jnp.stack([found[which] for which in range(len(found))])
