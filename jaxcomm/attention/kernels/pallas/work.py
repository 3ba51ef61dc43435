"""The work of a Pallas kernel: which tiles it visits, and the arrays it reads.

A program of the kernel owns a tile of rows and walks over tiles of columns. The list of
those that the mask leaves it is computed before, from the tokens: first the tiles that
are visible as a whole, then those that need the mask.

Source: He et al., FlexAttention, 2024, for the lists.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.scores import Tile
from jaxcomm.attention.mask import FULL, PARTIAL, SKIP, Coordinates
from jaxcomm.compat import gpus

LOG2_E = 1.4426950408889634
# The position of keys that fill up a tile: beyond all.
_BEYOND = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a kernel cuts its work.

    Attributes:
      queries, keys: tokens of a tile, powers of two.
      warps: of a program.
      stages: tiles on their way at once.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Visits(NamedTuple):
    """The tiles that a tile visits.

    Attributes:
      order: int32 (1 or B, tiles, n), tiles: the whole ones, the masked, the others.
      counts: int32 (1 or B, tiles, 2), how many are whole, and how many are visible.
    """

    order: Any
    counts: Any


class Work:
    """The arrays of a hop, padded to whole tiles, and what each program reads.

    Attributes:
      query, key, value: (B, T, N, D), (B, S, K, D), (B, S, K, V), padded: tokens to
        whole tiles, heads to powers of two.
      queries, keys: their tokens, all (1 or B, T) and (1 or B, S).
      slopes, seeds: (B, N), or None.
      bias: (1 or B, 1 or N, 1 or T, S), padded, or None.
      group: query heads of a key head.
      unit: factor on the scores that are the exponents of 2.
    """

    def __init__(self, hop: Hop, sizes: Sizes):
        self.hop, self.sizes = hop, sizes
        self.batch, self.length, self.heads, self.head_size = hop.query.shape
        self.value_size = hop.value.shape[3]
        self.group = self.heads // hop.key.shape[2]
        self.query = self.pad_rows(hop.query)
        self.key, self.value = (_pad(x, sizes.keys) for x in (hop.key, hop.value))
        batch = 1 if hop.pairs.has_shared_tokens else self.batch

        def pad(tokens: Coordinates, size: int, fill: int | None = None):
            found = jax.tree.map(lambda x: _pad_tokens(x, batch, size), tokens)
            at = _pad_tokens(tokens.positions, batch, size, fill)
            return found._replace(positions=at)

        self.queries = pad(hop.pairs.queries, sizes.queries)
        self.keys = pad(hop.pairs.keys, sizes.keys, _BEYOND)
        self.slopes, self.seeds = hop.scores.slopes, hop.scores.seeds
        self.bias = hop.scores.bias
        if self.bias is not None:
            rows = -self.bias.shape[2] % sizes.queries if self.bias.shape[2] > 1 else 0
            columns = -self.bias.shape[3] % sizes.keys
            padding = [(0, 0), (0, 0), (0, rows), (0, columns)]
            self.bias = jnp.pad(self.bias, padding)
        # Then no tile computes the factor between natural and binary logarithms.
        is_plain = hop.scores.soft_cap is None and self.slopes is self.bias is None
        self.unit = LOG2_E if is_plain else 1.0

    @property
    def tiles(self) -> tuple[int, int]:
        """How many tiles of queries there are, and how many of keys."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        return queries // self.sizes.queries, keys // self.sizes.keys

    def visits(self) -> tuple[Visits, Visits]:
        """Return which tiles of keys each tile of queries visits, and the reverse."""
        modes = self.modes()
        return _visits(modes), _visits(jnp.swapaxes(modes, 1, 2))

    def modes(self):
        """Return what each pair of tiles needs, int32 (1 or B, tiles, tiles)."""
        sizes = self.sizes.queries, self.sizes.keys
        return self.hop.pairs.mask.modes(
            *(
                jax.tree.map(lambda x, size=size: x.reshape(len(x), -1, size), tokens)
                for tokens, size in zip((self.queries, self.keys), sizes, strict=True)
            )
        )

    def pad_rows(self, x):
        """Pad (B, T, N, size) to whole tiles, and heads to a power of two."""
        return _pad(x, self.sizes.queries)

    def pad_of_rows(self, x):
        """(B, T, N) to (B, N, T), padded to whole tiles of queries."""
        x = jnp.moveaxis(x, 2, 1)
        return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % self.sizes.queries)])

    def crop_rows(self, x, size: int):
        """Undo :meth:`pad_rows`."""
        return x[:, : self.length, :, :size]

    def scores(self, tile: Tile, products):
        """Return exponents of 2 for products of queries and keys, and the cap's slope.

        See ``Tile.bend``.
        """
        scores, derivative = tile.bend(products * (self.hop.scores.scale * self.unit))
        return scores * (LOG2_E / self.unit), derivative

    def tile(self, rows: Coordinates, keys: Coordinates, *terms, is_masked, across):
        """Return a tile for scores (rows, keys), or (keys, rows) if ``across``.

        Args:
          terms: slope, seed and bias, the last in the order of the scores.
        """
        slope, seed, bias = terms
        return Tile(
            scores=self.hop.scores.replace(bias=bias, slopes=slope, seeds=seed),
            mask=self.hop.pairs.mask,
            rows=rows.expanded(0 if across else 1),
            keys=keys.expanded(1 if across else 0),
            is_masked=is_masked,
        )

    def bias_at(self, bias, head, rows, columns):
        """Read a tile of the bias of a head from a ref (heads, T, S) or of ones."""
        heads, length, _ = bias.shape
        return bias[
            head if heads > 1 else 0, rows if length > 1 else slice(0, 1), columns
        ]

    def bias_spec(
        self, heads: int | None, rows: int | None, columns: int | None, place
    ):
        """Return the blocks of the bias, or None.

        Args:
          heads: of a block, or None for one that the block does not count.
          rows, columns: of a block, or None for all.
          place: from a program's indices to a block of each dimension.
        """
        if self.bias is None:
            return None
        shape = self.bias.shape

        def index(*ids):
            pairs = zip(place(*ids), shape, strict=True)
            return tuple(i if held > 1 else 0 for i, held in pairs)

        sizes = (rows or shape[2], columns or shape[3])
        of_heads = heads if heads is None else min(heads, shape[1])
        block = (None, of_heads, *map(min, sizes, shape[2:]))
        return pl.BlockSpec(block, index)

    def of_batch(self, x):
        """Return a function from a batch to where ``x``, of 1 or B of them, has it."""
        return (lambda b: b) if x.shape[0] > 1 else (lambda b: 0)

    def token_specs(self, tokens: Coordinates, block: int | None, place):
        """Return the blocks of tokens: all of them, or those of a program's tile.

        Args:
          tokens: those of the queries or of the keys.
          block: tokens of a block, or None for all.
          place: from a program's indices to (batch, block).
        """

        def spec(x):
            batch = self.of_batch(x)

            def index(*ids):
                b, i = place(*ids)
                return batch(b), i

            return pl.BlockSpec((None, block or x.shape[1]), index)

        return jax.tree.map(spec, tokens)


def _visits(modes) -> Visits:
    rank = jnp.where(modes == FULL, 0, jnp.where(modes == PARTIAL, 1, 2))
    order = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    counts = [(modes == FULL).sum(-1), (modes != SKIP).sum(-1)]
    return Visits(order, jnp.stack(counts, -1).astype(jnp.int32))


def _pad(x, tokens: int):
    size = pl.next_power_of_2(max(x.shape[3], 16))
    padding = [(0, 0), (0, -x.shape[1] % tokens), (0, 0), (0, size - x.shape[3])]
    return jnp.pad(x, padding) if any(map(any, padding)) else x


def _pad_tokens(x, batch: int, size: int, fill: int | None = None):
    """(T,) or (B, T) to (batch, whole tiles); ``fill`` None repeats the last token."""
    x = jnp.broadcast_to(x, (batch, x.shape[-1]))
    padding = [(0, 0), (0, -x.shape[1] % size)]
    if fill is None:
        return jnp.pad(x, padding, mode="edge")
    return jnp.pad(x, padding, constant_values=fill)


def walk(visits: Visits, visit, carry):
    """Visit the tiles that are whole, then those that need the mask."""
    whole, visible = visits.counts[0], visits.counts[1]
    carry = jax.lax.fori_loop(0, whole, visit(False), carry)
    return jax.lax.fori_loop(whole, visible, visit(True), carry)


def product(a, b):
    """Return the product of two matrices in float32."""
    # Else a GPU rounds float32 to 11 bits.
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def divide(number, by: int):
    """Divide a number that is not negative; Triton has no ``%`` of both signs."""
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def read(refs, at: Any = ...):
    """Read the refs of a pytree."""
    return jax.tree.map(lambda ref: ref[at], refs)


def operands_of(work: Work, visits: Visits | None):
    """Return the operands of all kernels."""
    return (
        *(visits, work.queries, work.keys, work.slopes, work.seeds, work.bias),
        *(work.query, work.key, work.value),
    )


def float32_of(*shape):
    """Return the type of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def visit_specs(work: Work, visits: Visits) -> Visits:
    """Return the blocks of the tiles that a program visits."""
    batch = work.of_batch(visits.counts)

    def spec(x):
        return pl.BlockSpec((None, None, x.shape[2]), lambda i, h, b: (batch(b), i, 0))

    return Visits(*map(spec, visits))


def common_specs(work: Work, visits: Visits):
    """Return the blocks of visits, tokens and terms of a program for queries."""

    def per_head(x):
        if x is None:
            return None
        return pl.BlockSpec((None, None), lambda i, h, b: (b, h))

    return (
        visit_specs(work, visits),
        work.token_specs(work.queries, work.sizes.queries, lambda i, h, b: (b, i)),
        work.token_specs(work.keys, None, lambda i, h, b: (b, 0)),
        *(per_head(work.slopes), per_head(work.seeds)),
        work.bias_spec(None, work.sizes.queries, None, lambda i, h, b: (b, h, i, 0)),
    )


def row_specs(work: Work):
    """Return what a program for queries reads and writes.

    Returns:
      Two functions of an array, to its block: of the program's queries; and of all
      keys, or values, that they may see. And the block of a number for each query.
    """
    queries, group = work.sizes.queries, work.group

    def rows(x):
        block = (None, queries, None, x.shape[3])
        return pl.BlockSpec(block, lambda i, h, b: (b, i, h, 0))

    def whole(x):
        block = (None, x.shape[1], None, x.shape[3])
        return pl.BlockSpec(block, lambda i, h, b: (b, 0, h // group, 0))

    return rows, whole, pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, i))


def call_kernel(kernel, *, sizes: Sizes, interpret: bool, **options):
    """Return ``pallas_call`` of a kernel, for Triton or interpreted."""
    return pl.pallas_call(
        kernel,
        compiler_params=gpus.triton_parameters(warps=sizes.warps, stages=sizes.stages),
        interpret=interpret,
        **options,
    )
