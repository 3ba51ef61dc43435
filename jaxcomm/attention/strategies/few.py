"""A ring of documents of which few are cut: one gather, and one call more.

Each rank sends the part of its keys that others see. Its queries that see any are one
call of the packed kernel: once; or, where a query sees keys of several ranks, once for
each of them. What there is less of than fits has sequences of no length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.pieces import Starts
from jaxcomm.attention.mask import Coordinates, Mask, Run
from jaxcomm.attention.strategies.beside import Beside, Part
from jaxcomm.attention.table import copies, few
from jaxcomm.collectives.all_to_all import all_to_all
from jaxcomm.collectives.split_phase import all_gather_start


class Few(NamedTuple):
    """Which tokens are sent and computed.

    Attributes:
      queries, keys: int32 (B, few), this rank's tokens that see, and that are seen.
      starts: of the sequences of the one call.
    """

    queries: Any
    keys: Any
    starts: Starts

    @classmethod
    def of(cls, way: int, parts, starts, size: int, tokens: int) -> "Few":
        """Return what one measure of a table says.

        Args:
          parts: int32 (B, 2, 2, some), of queries and of keys, as in ``Table.at``.
          starts: int32 (B, 2, sequences + 1).
          size: the number of ranks.
          tokens: how many a row has.
        """
        count = few(tokens, way)
        queries, keys = (_tokens_of(parts[:, i], count) for i in range(2))
        shape = copies(way, size) * count, size * count
        found = (in_rows(starts[:, i], n) for i, n in enumerate(shape))
        return cls(queries, keys, Starts(*found))


def in_rows(starts, tokens: int):
    """Return starts of rows, one behind the other: int32 (B, n) to (B * n,).

    Between two rows lies a sequence of no length.
    """
    row = jnp.arange(len(starts), dtype=jnp.int32) * tokens
    return (starts + row[:, None]).reshape(-1)


def _tokens_of(parts, count: int):
    """Return the few tokens of each row, by its parts: int32 (B, 2, some)."""
    number = jax.lax.iota(jnp.int32, count)
    begin, token = parts[:, 0, :, None], parts[:, 1, :, None]
    end = jnp.append(begin[:, 1:], jnp.full_like(begin[:, :1], count), 1)
    is_here = (begin <= number) & (number < end)
    return jnp.where(is_here, token + number - begin, 0).sum(1)


class FewHops(Beside):
    """The hops of other ranks' keys, of a ring in which few are seen.

    Attributes:
      copies: how often the queries are in the one call.
    """

    def __init__(self, way: int, known: Few, size: int):
        self.starts, self.copies = known.starts, copies(way, size)
        self.count = known.queries.shape[1]
        self.queries, self.keys = Part(known.queries), Part(known.keys)

    def start(self, loop):
        sent = [self.keys.of(x) for x in loop.own_block[:2]]
        return all_gather_start(sent, loop.call.axis_name, axis=1, tiled=True)

    def home(self, loop, grads):
        # They are the kernel's, which rounds, and nothing was added.
        grads = [x.astype(loop.inputs.query.dtype) for x in grads]
        return all_to_all(grads, loop.call.axis_name, 1, 1, tiled=True)

    def apart(self, x):
        parts = x.reshape(x.shape[0], -1, self.count, *x.shape[2:])
        return [parts[:, i] for i in range(parts.shape[1])]

    def of_queries(self, x):
        """Return the few queries' part of an array, as often as they are there."""
        x = self.queries.of(x)[:, None]
        shape = x.shape[0], self.copies, *x.shape[2:]
        return jnp.broadcast_to(x, shape).reshape(shape[0], -1, *shape[3:])

    def hop(self, loop, keys):
        """Return the hop of the few queries, each time, and of all keys that came.

        For a kernel that does not know packed sequences a sequence is a document.
        """
        query, starts = self.of_queries(loop.inputs.query), self.starts
        batch, *_ = keys[0].shape
        counts = query.shape[1], keys[0].shape[1]
        queries, of_keys = (
            _numbers_in(x, batch, count)
            for x, count in zip(starts, counts, strict=True)
        )
        return loop.others.replace(
            query=query,
            key=keys[0],
            value=keys[1],
            queries=queries,
            keys=of_keys,
            mask=Mask(None, None, 1, 1),
            query_segments=counts[:1],
            key_segments=counts[1:],
            blocks=(),
            block=None,
            runs=(Run((0, counts[0]), (0, counts[1]), "apart", False, starts),),
        )


def _numbers_in(starts, batch: int, count: int) -> Coordinates:
    """Return tokens of which each has the number of its sequence as its document."""
    place = jax.lax.iota(jnp.int32, batch * count)[:, None]
    number = (starts <= place).sum(1, dtype=jnp.int32)
    return Coordinates(jnp.zeros(count, jnp.int32), number.reshape(batch, count))
