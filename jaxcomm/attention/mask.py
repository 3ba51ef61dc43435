"""Which keys a query sees, as a function of two sets of tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# What a tile needs. The numbers index the branches of jax.lax.switch.
SKIP, FULL, PARTIAL = 0, 1, 2

# Of a token that sees nothing and is not seen. So does every negative number.
PADDING = -1


class Range(NamedTuple):
    """For each token of one side, a range of positions of the other side.

    Attributes:
      first: int32 (B, T), the first position.
      end: int32 (B, T), the one behind the last.
    """

    first: Any
    end: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranges:
    """A mask as ranges of positions: numbers for each token, not for each pair.

    Pass it as ``mask=`` of ``ring_attention`` and ``dot_product_attention``. What it
    hides is hidden beside causality, window and documents. Positions are those in the
    whole sequence, from 0 on.

    Prefixes and images whose tokens all see each other are ``keys``. A tree is
    ``queries``, with ``is_causal=True``: a token is seen until its branch ends. Where a
    range has no end, pass the length of the sequence: JAX may cut larger integers.

    Attributes:
      keys: a pair (first, end) of int (B, T), (1, T) or (T,): query t sees keys at
        ``first[t] <= position < end[t]``. If None, all.
      queries: a pair of int (B, S), (1, S) or (S,): key s is seen by queries at
        ``first[s] <= position < end[s]``. If None, by all.

    >>> @jax.jit
    ... def attend(x):
    ...     at = jnp.arange(512)
    ...     prefix = Ranges(keys=(0 * at, jnp.maximum(at + 1, 100)))
    ...     return jaxcomm.dot_product_attention(
    ...         x, x, x, mask=prefix, sharding=jax.P("data", "context"))
    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "context"))):
    ...     out = attend(jnp.ones((2, 512, 4, 64)))
    >>> out.shape
    (2, 512, 4, 64)
    """

    keys: Any = None
    queries: Any = None


def ranges_of(mask: Ranges, queries: tuple, keys: tuple, what: str) -> Ranges:
    """Return a mask of ranges whose numbers are int32 of these shapes.

    Args:
      mask: as a user gave it.
      queries, keys: the shapes of what it may have a number for, (B, T) and (B, S), or
        both without B.
    """
    if mask.keys is None and mask.queries is None:
        raise ValueError(
            f"{what}: mask={mask!r} has no ranges. Pass Ranges(keys=(first, end)), "
            "queries=(first, end), or both."
        )
    return Ranges(
        _range_of(mask.keys, queries, f"{what}: keys of mask=Ranges"),
        _range_of(mask.queries, keys, f"{what}: queries of mask=Ranges"),
    )


def _range_of(pair, shape: tuple, what: str) -> Range | None:
    if pair is None:
        return None
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{what} is of type {type(pair).__name__}. Pass a pair of arrays: first "
            "positions, and those behind the last."
        )
    found = []
    for name, x in zip(("first", "end"), pair, strict=True):
        x = x if isinstance(x, (jax.Array, np.ndarray)) else jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{what}: {name} has dtype {x.dtype}. Pass integers.")
        if x.shape not in (shape, shape[-1:], (1, shape[-1])):
            raise ValueError(
                f"{what}: {name} has shape {x.shape}, and {shape} is expected, or "
                f"{shape[-1:]} for all sequences: a number for each token that is here."
            )
        # Of wider integers only a number beyond all positions does not fit.
        kept, info = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
        if info.min < kept.min or info.max > kept.max:
            x = x.clip(max(info.min, kept.min), kept.max)
        x = x.astype(jnp.int32).reshape(x.shape[-len(shape) :])
        found.append(jnp.broadcast_to(x, shape))
    return Range(*found)


class Coordinates(NamedTuple):
    """What a mask knows of the queries or of the keys of a hop.

    Attributes:
      positions: int32 (T,) or (B, T), positions in the whole sequence.
      segment_ids: int32 (B, T), the document of each token, or negative for padding.
        If None, all tokens are of one document.
      range: of queries, which keys each may see; of keys, which queries may see each.
        If None, nothing is left out.
    """

    positions: Any
    segment_ids: Any = None
    range: Range | None = None

    @property
    def is_shared(self) -> bool:
        """Whether all sequences of the batch have the same tokens."""
        is_alike = self.segment_ids is None and self.range is None
        return is_alike and self.positions.ndim == 1

    def expanded(self, axis: int) -> "Coordinates":
        """Return them with one dimension more."""
        return jax.tree.map(lambda x: jnp.expand_dims(x, axis), self)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The rule by which a query sees a key. A causal mask is ``right=0``.

    Attributes:
      left: how many positions before its own a query sees. If None, all of them.
      right: how many positions after its own a query sees. If None, all of them.
      query_length: queries at this position or later see nothing.
      key_length: keys at this position or later are not seen.
    """

    left: int | None
    right: int | None
    query_length: int
    key_length: int

    @property
    def is_causal(self) -> bool:
        """Whether it is the causal mask without a window."""
        return self.left is None and self.right == 0

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key, padding apart."""
        return self.left is None and self.right is None

    def allowed(self, queries: Coordinates, keys: Coordinates) -> jax.Array:
        """Return which keys each query sees, as bool.

        Args:
          queries, keys: coordinates whose arrays broadcast together.
        """
        seen = queries.positions < self.query_length
        seen = seen & (keys.positions < self.key_length)
        if self.right == 0:
            seen = seen & (queries.positions >= keys.positions)
        elif self.right is not None:
            seen = seen & (queries.positions - keys.positions >= -self.right)
        if self.left is not None:
            seen = seen & (queries.positions - keys.positions <= self.left)
        if queries.segment_ids is not None:
            seen = seen & (queries.segment_ids == keys.segment_ids)
            seen = seen & (queries.segment_ids >= 0)
        for each, others in ((queries.range, keys), (keys.range, queries)):
            if each is not None:
                seen = seen & (others.positions >= each.first)
                seen = seen & (others.positions < each.end)
        return seen

    def modes(self, query_tiles: Coordinates, key_tiles: Coordinates) -> jax.Array:
        """Say for each pair of tiles whether to skip it, take it whole, or mask it.

        Args:
          query_tiles: arrays of shape (..., query tiles, tokens of a tile).
          key_tiles: arrays of shape (..., key tiles, tokens of a tile).

        Returns:
          int32 (..., query tiles, key tiles) of SKIP, FULL and PARTIAL. A tile that is
          not SKIP may still have nothing visible.
        """
        first_query, last_query = _ends(query_tiles.positions, -1)
        first_key, last_key = _ends(key_tiles.positions, -2)
        any_seen = (first_query < self.query_length) & (first_key < self.key_length)
        all_seen = (last_query < self.query_length) & (last_key < self.key_length)
        if self.right is not None:
            any_seen &= last_query - first_key >= -self.right
            all_seen &= first_query - last_key >= -self.right
        if self.left is not None:
            any_seen &= first_query - last_key <= self.left
            all_seen &= last_query - first_key <= self.left
        if query_tiles.segment_ids is not None:
            first, last = _ends(query_tiles.segment_ids, -1)
            first_of_keys, last_of_keys = _ends(key_tiles.segment_ids, -2)
            any_seen &= (last >= 0) & (last_of_keys >= first) & (last >= first_of_keys)
            is_one = (first == last) & (first_of_keys == last_of_keys)
            all_seen &= (first >= 0) & is_one & (first == first_of_keys)
        for each, axis, first, last in (
            (query_tiles.range, -1, first_key, last_key),
            (key_tiles.range, -2, first_query, last_query),
        ):
            if each is not None:
                lowest, highest = _ends(each.first, axis)
                least_end, most_end = _ends(each.end, axis)
                any_seen &= (last >= lowest) & (first < most_end)
                all_seen &= (first >= highest) & (last < least_end)
        modes = jnp.where(all_seen & any_seen, FULL, jnp.where(any_seen, PARTIAL, SKIP))
        return modes.astype(jnp.int32)


def _ends(tiles, axis: int):
    """Return the smallest and the largest number of each tile, one axis added."""
    return (
        jnp.expand_dims(tiles.min(-1), axis),
        jnp.expand_dims(tiles.max(-1), axis),
    )


_P = ParamSpec("_P")
_R = TypeVar("_R")


def promotes_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function broadcast arrays under ``jax_numpy_rank_promotion="raise"``.

    Positions have a dimension more where sequences of a batch differ in them, and all
    that is computed of them serves both.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **options: _P.kwargs) -> _R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **options)

    return wrapped
