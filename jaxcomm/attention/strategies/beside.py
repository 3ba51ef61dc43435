"""Keys that come in one send while a rank computes its own: one call more.

A border of a window is such keys, and so are the few keys of documents that are cut:
each rank sends the part of its keys that others see. Its queries that see any are one
call of the packed kernel: once; or, where a query sees keys of several ranks, once for
each of them. What there is less of than fits has sequences of no length.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.pieces import Starts
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.mask import Coordinates, Mask, Run
from jaxcomm.attention.strategies.loop import Loop, completion
from jaxcomm.attention.table import copies, few
from jaxcomm.collectives.all_to_all import all_to_all
from jaxcomm.collectives.split_phase import all_gather_start

_ONCE: Any = {
    "unique_indices": True, "mode": "promise_in_bounds",
}  # fmt: skip


class Beside(abc.ABC):
    """One call of some of a rank's queries over some keys of other ranks.

    Attributes:
      queries, keys: the parts of this rank's tokens that see, and that are seen.
    """

    queries: "Part"
    keys: "Part"

    @abc.abstractmethod
    def start(self, loop: Loop) -> Any:
        """Begin to send the keys that others see."""

    @abc.abstractmethod
    def hop(self, loop: Loop, keys) -> Hop:
        """Return the hop of the queries over the keys that came."""

    @abc.abstractmethod
    def home(self, loop: Loop, grads) -> Any:
        """Send gradients of keys and values to where these came from."""

    def of_queries(self, x):
        """Return what the hop takes of an array of all queries."""
        return self.queries.of(x)

    def apart(self, x) -> list:
        """Return the parts of a result, each of as many tokens as its ``Part``."""
        return [x]

    def seen(self, lse):
        """Return log-sum-exps with -inf where nothing is seen after all."""
        return lse

    def attend(self, loop: Loop):
        """Return (out, lse) of a rank's own keys and of those that came."""
        arriving = self.start(loop)
        own = loop.hop(loop.then(arriving, loop.own_block), 0)
        out, lse = loop.attend(own, 0)
        out = loop.rounded(out)
        keys = loop.done(arriving, after=loop.written(out, lse))
        some, some_lse = loop.attend(self.hop(loop, keys), 1)
        others = map(self.apart, (some, self.seen(some_lse)))
        dtype = loop.inputs.query.dtype
        return self.queries.merged(out, lse, *zip(*others, strict=True), dtype=dtype)

    def differentiate(self, loop: Loop, saved: Saved) -> Grads:
        """Return gradients in the dtype of the query."""
        arriving = self.start(loop)
        own = loop.hop(loop.then(arriving, loop.own_block), 0)
        grads = jax.tree.map(loop.rounded, loop.gradients(own, 0, saved))
        keys = loop.done(arriving, after=completion(grads.key))
        some = jax.tree.map(self.of_queries, saved)
        some = some._replace(lse=self.seen(some.lse))
        found = loop.gradients(self.hop(loop, keys), 1, some)
        back = self.home(loop, (found.key, found.value))
        how = {"sums": found.query.dtype, "dtype": loop.inputs.query.dtype}
        parts = self.queries, self.keys, self.keys
        pairs = zip(parts, grads[:3], (found.query, *back), strict=True)
        return Grads(*(part.plus(x, *self.apart(y), **how) for part, x, y in pairs))


class Part(NamedTuple):
    """Some tokens of each row: int32 (B, some), each of them once; or a slice."""

    tokens: Any

    def of(self, x):
        """Return these tokens of (B, T, ...)."""
        if isinstance(self.tokens, slice):
            return x[:, self.tokens]
        return self._mapped(lambda x, tokens: x.at[tokens].get(**_ONCE), x)

    def over(self, x, part):
        """Return (B, T, ...) with other tokens."""
        # XLA (jaxlib 0.11.2) has the kernel that made x write into the result. It
        # refuses the program then: what is written needs x. And where one kernel
        # computes what it writes, from x, it works on a copy of all of x.
        x, part = jax.lax.optimization_barrier((x, part.astype(x.dtype)))
        if isinstance(self.tokens, slice):
            return x.at[:, self.tokens].set(part)
        return self._mapped(
            lambda x, part, tokens: x.at[tokens].set(part, **_ONCE), x, part
        )

    def merged(self, out, lse, *others, dtype):
        """Return (out, lse) in which these queries saw other keys too.

        Args:
          out, lse: of all queries.
          others: of these queries, over other keys.
          dtype: of the output. It is rounded before: what was computed is written
            once, and this part over it.
        """
        found = merge((self.of(out).astype(lse.dtype), self.of(lse)), *others)
        return self.over(out.astype(dtype), found[0]), self.over(lse, found[1])

    def plus(self, x, *added, sums, dtype):
        """Return an array to whose part others are added.

        Args:
          sums: the dtype in which they are.
          dtype: of the result.
        """
        total = sum((each.astype(sums) for each in added), self.of(x).astype(sums))
        return self.over(x.astype(dtype), total)

    def _mapped(self, of_row, *arrays):
        if len(self.tokens) == 1:
            return of_row(*(x[0] for x in (*arrays, self.tokens)))[None]
        return jax.vmap(of_row)(*arrays, self.tokens)


def few_of(way: int, parts, starts, size: int, tokens: int):
    """Return which tokens are sent and computed, by one measure of a table.

    Args:
      parts: int32 (B, 2, 2, some), of queries and of keys, as in ``Table.at``.
      starts: int32 (B, 2, sequences + 1).
      size: the number of ranks.
      tokens: how many a row has.

    Returns:
      int32 (B, few), this rank's tokens that see; those that are seen; and the starts
      of the sequences of the one call.
    """
    count = few(tokens, way)
    queries, keys = (_tokens_of(parts[:, i], count) for i in range(2))
    shape = copies(way, size) * count, size * count
    found = (in_rows(starts[:, i], n) for i, n in enumerate(shape))
    return queries, keys, Starts(*found)


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

    Args:
      known: what :func:`few_of` returned.

    Attributes:
      copies: how often the queries are in the one call.
    """

    def __init__(self, way: int, known: tuple, size: int):
        queries, keys, self.starts = known
        self.copies, self.count = copies(way, size), queries.shape[1]
        self.queries, self.keys = Part(queries), Part(keys)

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
            segments=(counts[:1], counts[1:]),
            blocks=(),
            block=None,
            runs=(Run((0, counts[0]), (0, counts[1]), "apart", False, starts),),
        )


def _numbers_in(starts, batch: int, count: int) -> Coordinates:
    """Return tokens of which each has the number of its sequence as its document."""
    place = jax.lax.iota(jnp.int32, batch * count)[:, None]
    number = (starts <= place).sum(1, dtype=jnp.int32)
    return Coordinates(jnp.zeros(count, jnp.int32), number.reshape(batch, count))
