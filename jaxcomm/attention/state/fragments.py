"""The fragments of a rank: tokens in consecutive positions, cut into equal rows."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.state.maps import (
    StateMap,
    chosen,
    composed,
    entering,
    states,
    varying_like,
)
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import psum

# Each sends a map of its own. Zigzag has two.
_MOST = 16


@dataclasses.dataclass(frozen=True)
class Fragments:
    """The fragments of each rank, where positions are known when a program is traced.

    Attributes:
      bounds: the first token of each fragment, and the number of tokens: (F + 1,).
        Equal on all ranks.
      order: the fragments of all ranks, counted rank by rank, in the order of the
        sequence: (size * F,).
      rows: into how many rows a fragment is cut.
      length: tokens of a row, padding included.
      linked: bool (F, B), which fragments of this rank go on with the document before
        them. If None, all do.
    """

    bounds: tuple[int, ...]
    order: tuple[int, ...]
    rows: int
    length: int
    linked: Any = None

    @classmethod
    def of(cls, layout: Layout, chunk: int, what: str) -> "Fragments":
        """Find the fragments of a layout, for rows of chunks of so many tokens.

        Raises:
          ValueError: there are too many.
        """
        size, count = layout.size, layout.local_length
        held = np.stack([np.asarray(layout.positions_of(rank)) for rank in range(size)])
        # Where one rank's positions jump, a fragment begins on all of them.
        inner = np.flatnonzero((np.diff(held, axis=1) != 1).any(0)) + 1
        bounds = (0, *inner.tolist(), count)
        found = len(bounds) - 1
        if found > _MOST or (layout.schedule.name == "striped" and found > 1):
            raise ValueError(
                f"{what}: the schedule {layout.schedule!r} deals each rank {found} "
                f"fragments of consecutive tokens, of {count} tokens. The state would "
                "travel once for each. Reorder the batch with the schedule 'zigzag' or "
                "'contiguous'."
            )
        order = np.argsort(held[:, bounds[:-1]].reshape(-1), kind="stable")
        longest = max(np.diff(bounds).tolist())
        rows, length = rows_of(longest, chunk)
        return cls(bounds, tuple(order.tolist()), rows, length)

    @property
    def count(self) -> int:
        """The number of fragments of a rank."""
        return len(self.bounds) - 1

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The first token of each fragment, and the one behind its last."""
        return tuple(itertools.pairwise(self.bounds))

    def begins(self, ids):
        """Return where a document begins inside a fragment, bool (B, T)."""
        before = jnp.concatenate([ids[:, :1], ids[:, :-1]], 1)
        at = jax.lax.iota(jnp.int32, ids.shape[1])
        is_first = functools.reduce(jnp.logical_or, [at == b for b in self.bounds[:-1]])
        return begin_documents(ids, before) & ~is_first

    def with_links(self, ids, axis_name) -> "Fragments":
        """Say which fragments go on with a document, by the ids next to them."""
        if len(self.order) == 1:
            return self
        first = jnp.stack([ids[:, at] for at in self.bounds[:-1]])
        last = jnp.stack([ids[:, at - 1] for at in self.bounds[1:]])
        every = all_gather(last, axis_name)
        before = np.zeros(len(self.order), np.int32)
        before[list(self.order[1:])] = self.order[:-1]
        mine = jnp.asarray(before.reshape(-1, self.count))
        mine = mine[jax.lax.axis_index(axis_name)]
        # The state before the first of all is zeros.
        linked = ~begin_documents(first, every.reshape(-1, *last.shape[1:])[mine])
        return dataclasses.replace(self, linked=linked)

    def _by_row(self, tree, is_mirrored: bool):
        """Return what is of each row as (rows, F, B, ...)."""
        return jax.tree.map(
            lambda x: x.reshape(self.rows, self.count, -1, *x.shape[1:])[
                :: -1 if is_mirrored else 1
            ],
            tree,
        )

    def whole(self, maps: StateMap) -> StateMap:
        """Return the map of each fragment, (F, B, ...), from those of the rows."""
        return jax.tree.map(lambda x: x[-1], composed(self._by_row(maps, False)))

    def entering(self, whole: StateMap, axis_name, *, is_mirrored: bool = False):
        """Return the state before each fragment, (F, B, ...): the exchange.

        Mirrored, it is the gradient of the state behind each.
        """
        if len(self.order) == 1:
            return varying_like(jnp.zeros_like(whole.addend), whole.addend)
        order = self.order[::-1] if is_mirrored else self.order
        if self.linked is None:
            return entering(whole, order, axis_name)
        factor, addend = chosen(self.linked, whole.factor), whole.addend
        if is_mirrored:
            addend = chosen(self.linked, addend)
        found = entering(StateMap(factor, addend), order, axis_name)
        return found if is_mirrored else chosen(self.linked, found)

    def states(self, maps: StateMap, entering, *, is_mirrored: bool = False):
        """Return the state before each row, and the state behind each fragment."""
        before, behind = states(self._by_row(maps, is_mirrored), entering)
        before = before[::-1] if is_mirrored else before
        return before.reshape(-1, *before.shape[3:]), behind[-1]

    def last(self, states, axis_name):
        """Return the state behind the sequence, (B, ...), on all ranks."""
        rank, last = divmod(self.order[-1], self.count)
        is_last = jax.lax.axis_index(axis_name) == rank
        return psum(jnp.where(is_last, states[last], 0), axis_name)

    def cut(self, x):
        """Return tokens (B, T, ...) as rows, (rows * F * B, length, ...)."""
        batch, held = x.shape[0], self.rows * self.length
        if held * self.count == x.shape[1]:
            parts = x.reshape(batch, self.count, self.rows, self.length, *x.shape[2:])
        else:
            parts = [
                jnp.pad(
                    x[:, start:stop],
                    [(0, 0), (0, held - (stop - start))] + [(0, 0)] * (x.ndim - 2),
                )
                for start, stop in self.pairs
            ]
            parts = jnp.stack(parts, 1)
            parts = parts.reshape(
                *parts.shape[:2], self.rows, self.length, *x.shape[2:]
            )
        parts = jnp.moveaxis(parts, (2, 1), (0, 1))
        return parts.reshape(-1, *parts.shape[3:])

    def join(self, x):
        """Return rows as tokens, (B, T, ...): what :meth:`cut` cut."""
        x = x.reshape(self.rows, self.count, -1, *x.shape[1:])
        x = jnp.moveaxis(x, (0, 1), (2, 1))
        x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
        lengths = np.diff(self.bounds)
        if (lengths == x.shape[2]).all():
            return x.reshape(len(x), -1, *x.shape[3:])
        parts = [x[:, part, :length] for part, length in enumerate(lengths)]
        return jnp.concatenate(parts, 1)


jax.tree_util.register_dataclass(
    Fragments, ["linked"], ["bounds", "order", "rows", "length"]
)


def rows_of(tokens: int, chunk: int) -> tuple[int, int]:
    """Return into how many rows to cut a fragment, and the tokens of each.

    All rows take their chunks together, one after the other; then the rows are put
    together, one after the other. So there are about as many as a row has chunks.

    >>> rows_of(4096, 64)
    (8, 512)
    """
    chunks = max(1, -(-tokens // chunk))
    rows = 1 << int(math.log2(math.isqrt(chunks)))
    return rows, -(-chunks // rows) * chunk


def begin_documents(ids, before):
    """Say which tokens begin a document, given those before them: bool.

    Padding, of negative ids, begins none: a state passes through it.
    """
    return (ids >= 0) & (ids != before)
