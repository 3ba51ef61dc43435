"""Fragments of a layout that is data: where they begin is known at run time."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.state.fragments import begin_documents
from jaxcomm.attention.state.maps import (
    StateMap,
    apply,
    chosen,
    composed,
    states,
    varying_like,
)
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import psum
from jaxcomm.primitives.arguments import integer

# The position of no token.
_NOWHERE = -2
# A fragment begins a row. Rows so short that this costs a fourth of the tokens at most.
_WASTE = 4


class Dealt(NamedTuple):
    """What the tokens of all ranks are, of one sequence.

    A fragment begins where a position does not follow the one before it, unless a
    document ends before it and another begins: then no state passes.

    Attributes:
      natural: int32 (length + 2,), the document of each position, negative behind.
      begins: bool (size, T), where a document begins.
      fragment: int32 (size, T), the fragment of each token among those of its rank.
      first: int32 (size, F), the first position of each fragment, if it goes on with a
        document; else _NOWHERE.
      start, last: int32 (size, F), the first and the last position of each fragment;
        behind the end and _NOWHERE of a fragment that is not there.
    """

    natural: Any
    begins: Any
    fragment: Any
    first: Any
    start: Any
    last: Any

    @classmethod
    def of(cls, order, ids, length: int, most: int) -> "Dealt":
        """Look at positions and documents, (size, T) each."""
        order = jnp.minimum(order, length)
        natural = jnp.full(length + 2, -1, jnp.int32).at[order].set(ids)
        natural = natural.at[length:].set(-1)
        is_new = begin_documents(natural, jnp.roll(natural, 1)).at[0].set(True)
        goes_on = ~is_new & (jnp.arange(length + 2) < length)
        before = jnp.roll(order, 1, 1)
        is_cut = goes_on[order] | goes_on[before + 1] | (order < before)
        is_cut = is_cut & (order != before + 1) & (order < length)
        fragment = jnp.cumsum(is_cut.at[:, 0].set(False), 1, dtype=jnp.int32)
        of_each = fragment[:, None] == jnp.arange(most)[:, None]  # (size, F, T)
        of_each = of_each & (order < length)[:, None]
        last = jnp.where(of_each, order[:, None], _NOWHERE).max(2)
        start = jnp.where(of_each, order[:, None], length + 1).min(2)
        first = jnp.where(goes_on[start], start, _NOWHERE)
        begins = is_new[order] & (order < length)
        return cls(natural, begins, fragment, first, start, last)


def checked_most(most, what: str) -> int:
    """Return how many fragments a rank may have, one or more."""
    most = integer(most, f"{what}: most_fragments")
    if most < 1:
        raise ValueError(f"{what}: most_fragments={most}. Pass one or more.")
    return most


def dealt_of(
    layout: Layout, ids: Any, most: int, axis_name, what: str
) -> tuple[Dealt, Any]:
    """Return what the tokens of all ranks are, and of all sequences their order.

    Args:
      layout: whose order is known at run time.
      ids: int32 (B, T), the documents of this rank's tokens, or None.
      most: fragments of a rank.
      axis_name: the axes that split the sequence.
      what: the function that was called.

    Returns:
      (dealt, order): arrays with a dimension B before the others.

    Raises:
      ValueError: there are no ids.
    """
    if ids is None:
        raise ValueError(
            f"{what}: the layout {layout.schedule!r} deals documents, and the tokens "
            "have no segment ids. Pass segment_ids to layout.reorder: jaxcomm.attention"
            ".segment_ids_of(lengths) makes them."
        )
    every = all_gather(ids, axis_name, axis=1)
    order = jnp.broadcast_to(layout.order, every.shape)
    look = jax.vmap(lambda order, ids: Dealt.of(order, ids, layout.length, most))
    return look(order, every), order


@dataclasses.dataclass(frozen=True)
class DealtFragments:
    """Fragments as rows: each begins one. See :class:`Fragments`, of the same methods.

    Attributes:
      rows, length: how many rows there are, and of how many tokens.
      slots: int32 (B, rows * length), the token of each place; T for none.
      places: int32 (B, T), where each token is.
      new: bool (B, T), where a document begins.
      which: int32 (rows, B), the fragment of each row.
      starts, ends: int32 (F, B), the first and the last row of each fragment.
      order: int32 (size * F, B), the fragments of all ranks in the order of their
        positions.
      before, behind: int32 (size * F, B), the fragment next to each in its document, or
        -1.
      final: int32 (B,), the fragment that ends the sequence.
      are_served: bool, whether no rank has more fragments.
    """

    rows: int
    length: int
    slots: Any
    places: Any
    new: Any
    which: Any
    starts: Any
    ends: Any
    order: Any
    before: Any
    behind: Any
    final: Any
    are_served: Any

    @classmethod
    def of(
        cls, layout: Layout, ids, chunk: int, most: int, axis_name, what: str
    ) -> "DealtFragments":
        """Find the fragments of this rank and of all others."""
        dealt, _ = dealt_of(layout, ids, most, axis_name, what)
        count, rank = layout.local_length, jax.lax.axis_index(axis_name)
        length = max(1, -(-count // (_WASTE * most * chunk))) * chunk
        rows = -(-count // length) + most

        def one(dealt: Dealt):
            fragment, numbers = dealt.fragment[rank], jnp.arange(most)
            tokens = (fragment[None] == numbers[:, None]).sum(1)
            needs = -(-tokens // length)
            starts = jnp.cumsum(needs) - needs
            within = jnp.arange(count) - (jnp.cumsum(tokens) - tokens)[fragment]
            places = starts[fragment] * length + within
            slots = jnp.full(rows * length, count).at[places].set(jnp.arange(count))
            # Rows behind the last fragment are its own, without tokens.
            has_begun = jnp.arange(rows)[:, None] >= jnp.where(needs > 0, starts, rows)
            which = jnp.where(has_begun, numbers, 0).max(1)
            first, start, last = (
                x.reshape(-1) for x in (dealt.first, dealt.start, dealt.last)
            )
            follows = (last[None] + 1 == first[:, None]) & (first >= 0)[:, None]

            def neighbour(pairs):
                return jnp.where(pairs.any(1), pairs.argmax(1), -1)

            return (
                slots, places, dealt.begins[rank], which, starts,
                jnp.maximum(starts + needs - 1, 0), jnp.argsort(start),
                neighbour(follows), neighbour(follows.T),
                jnp.argmax(last == layout.length - 1),
                (dealt.fragment[:, -1] < most).all(),
            )  # fmt: skip

        found = jax.vmap(one)(dealt)
        found = [x if x.dtype == bool else x.astype(jnp.int32) for x in found]
        by_sequence, of_all, (final, served) = found[:3], found[3:-2], found[-2:]
        of_all = [jnp.moveaxis(x, 0, 1) for x in of_all]
        return cls(rows, length, *by_sequence, *of_all, final, served.all())  # pyright: ignore[reportCallIssue]

    def begins(self, ids):
        """Return where a document begins, bool (B, T)."""
        return self.new

    def with_links(self, ids, axis_name) -> "DealtFragments":
        """Return itself: it knows the documents."""
        return self

    def cut(self, x):
        """Return tokens (B, T, ...) as rows, (rows * B, length, ...)."""
        x = jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
        x = jax.vmap(lambda x, at: x[at])(x, self.slots)
        x = x.reshape(len(x), self.rows, self.length, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(-1, self.length, *x.shape[3:])

    def join(self, x):
        """Return rows as tokens, (B, T, ...): what :meth:`cut` cut."""
        x = jnp.moveaxis(x.reshape(self.rows, -1, *x.shape[1:]), 0, 1)
        x = x.reshape(len(x), self.rows * self.length, *x.shape[3:])
        return jax.vmap(lambda x, at: x[at])(x, self.places)

    def _by_row(self, tree, is_mirrored: bool):
        """Return what is of each row as (rows, B, ...), and where fragments begin."""
        step = -1 if is_mirrored else 1
        tree = jax.tree.map(
            lambda x: x.reshape(self.rows, -1, *x.shape[1:])[::step], tree
        )
        at = jnp.arange(self.rows)[:, None, None]
        begin = (at == (self.ends if is_mirrored else self.starts)).any(1)
        return tree, begin[::step]

    def _picked(self, x, rows):
        """Return what is of some rows, (F, B): of each sequence of the batch."""
        return x[rows, jnp.arange(rows.shape[1])]

    def whole(self, maps: StateMap) -> StateMap:
        """Return the map of each fragment, (F, B, ...), from those of the rows."""
        found = composed(*self._by_row(maps, False))
        return jax.tree.map(lambda x: self._picked(x, self.ends), found)

    def entering(self, whole: StateMap, axis_name, *, is_mirrored: bool = False):
        """Return the state before each fragment, (F, B, ...): the exchange.

        Mirrored, it is the gradient of the state behind each.
        """
        every = all_gather(whole, axis_name)
        every = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), every)
        order = self.order[::-1] if is_mirrored else self.order
        neighbour = self.behind if is_mirrored else self.before
        batch = jnp.arange(order.shape[1])

        def step(found, which):
            near = neighbour[which, batch]
            state = chosen(near >= 0, found[near, batch])
            of = jax.tree.map(lambda x: x[which, batch], every)
            found = found.at[which, batch].set(apply(of.factor, state) + of.addend)
            return found, state

        start = varying_like(jnp.zeros_like(every.addend), every.addend)
        _, before = jax.lax.scan(step, start, order)
        # (size * F, B): when the turn of each came.
        turn = jnp.argsort(order, 0)
        count = self.starts.shape[0]
        mine = jax.lax.axis_index(axis_name) * count
        turn = jax.lax.dynamic_slice_in_dim(turn, mine, count)
        return self._picked(before, turn)

    def states(self, maps: StateMap, entering, *, is_mirrored: bool = False):
        """Return the state before each row, and the state behind each fragment."""
        step = -1 if is_mirrored else 1
        maps, begin = self._by_row(maps, is_mirrored)
        of_rows = self._picked(entering, self.which)[::step]
        before, behind = states(maps, of_rows, begin)
        before = before[::step].reshape(-1, *before.shape[2:])
        last = self.rows - 1 - self.starts if is_mirrored else self.ends
        return before, self._picked(behind, last)

    def last(self, states, axis_name):
        """Return the state behind the sequence, (B, ...), on all ranks."""
        rank, which = jnp.divmod(self.final, self.starts.shape[0])
        state = self._picked(states, which[None])[0]
        is_mine = rank == jax.lax.axis_index(axis_name)
        return psum(chosen(is_mine, state), axis_name)


_STATIC = ["rows", "length"]
jax.tree_util.register_dataclass(
    DealtFragments,
    [f.name for f in dataclasses.fields(DealtFragments) if f.name not in _STATIC],
    _STATIC,
)
