"""Keys that come in one send while a rank computes its own: one call more.

A border of a window is such keys, and so are the keys of documents that are cut: each
rank sends the part of its keys that others see. Its queries that see any are one call
of the packed kernel. The keys are listed for it, as its sequences see them: some twice.
What there is less of than fits has sequences of no length.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.pieces import Starts
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.pairs import Pairs, Run
from jaxcomm.attention.strategies.loop import Loop, completion
from jaxcomm.attention.table import MANY, Few, few, listed
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
    def home(self, loop: Loop, grads) -> list[Sequence]:
        """Send gradients of keys and values to where these came from.

        Returns:
          For each of the two what comes here, each of the tokens that are seen.
        """

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
        seen, dtype = (some, self.seen(some_lse)), loop.inputs.query.dtype
        return self.queries.merged(out, lse, seen, dtype=dtype)

    def differentiate(self, loop: Loop, saved: Saved) -> Grads:
        """Return gradients in the dtype of the query."""
        arriving = self.start(loop)
        own = loop.hop(loop.then(arriving, loop.own_block), 0)
        grads = jax.tree.map(loop.rounded, loop.gradients(own, 0, saved))
        keys = loop.done(arriving, after=completion(grads.key))
        some = jax.tree.map(self.queries.of, saved)
        some = some._replace(lse=self.seen(some.lse))
        found = loop.gradients(self.hop(loop, keys), 1, some)
        back = self.home(loop, (found.key, found.value))
        how = {"sums": found.query.dtype, "dtype": loop.inputs.query.dtype}
        parts = self.queries, self.keys, self.keys
        pairs = zip(parts, grads[:3], ([found.query], *back), strict=True)
        return Grads(*(part.plus(x, *added, **how) for part, x, added in pairs))


class Part(NamedTuple):
    """Some tokens of each row: int32 (B, some), each of them once; or a slice."""

    tokens: Any

    def of(self, x):
        """Return these tokens of (B, T, ...)."""
        if isinstance(self.tokens, slice):
            return x[:, self.tokens]
        return _in_rows(lambda x, tokens: x.at[tokens].get(**_ONCE), x, self.tokens)

    def over(self, x, part):
        """Return (B, T, ...) with other tokens."""
        # XLA (jaxlib 0.11.2) has the kernel that made x write into the result. It
        # refuses the program then: what is written needs x. And where one kernel
        # computes what it writes, from x, it works on a copy of all of x.
        x, part = jax.lax.optimization_barrier((x, part.astype(x.dtype)))
        if isinstance(self.tokens, slice):
            return x.at[:, self.tokens].set(part)
        return _in_rows(
            lambda x, part, tokens: x.at[tokens].set(part, **_ONCE),
            x,
            part,
            self.tokens,
        )

    def merged(self, out, lse, other, dtype):
        """Return (out, lse) in which these queries saw other keys too.

        Args:
          out, lse: of all queries.
          other: the same of these queries, over other keys.
          dtype: of the output. It is rounded before: what was computed is written
            once, and this part over it.
        """
        found = merge((self.of(out).astype(lse.dtype), self.of(lse)), other)
        return self.over(out.astype(dtype), found[0]), self.over(lse, found[1])

    def plus(self, x, *added, sums, dtype):
        """Return an array to whose part others are added.

        Args:
          sums: the dtype in which they are.
          dtype: of the result.
        """
        total = sum((each.astype(sums) for each in added), self.of(x).astype(sums))
        return self.over(x.astype(dtype), total)


def _in_rows(of_row, *arrays):
    """Return a function of each row of arrays."""
    if len(arrays[-1]) == 1:
        return of_row(*(x[0] for x in arrays))[None]
    return jax.vmap(of_row)(*arrays)


class Listed(NamedTuple):
    """Some keys of each row: int32 (B, some). None is there more than twice.

    What is behind all keys is none of them.
    """

    tokens: Any

    def of(self, x):
        """Return these keys of (B, keys, ...)."""
        return _in_rows(
            lambda x, at: x.at[at].get(mode="fill", fill_value=0), x, self.tokens
        )

    def summed(self, x, count: int):
        """Return float32 (B, count, ...): of each key what there is, added up.

        By two gathers: to add up what is scattered took 250 of 2,040 us of a rank of
        eight (24 documents in 32,768 tokens, one H200).

        Args:
          x: (B, some, ...), of these keys.
        """
        none = self.tokens.shape[1]

        def of_row(x, at):
            number = jnp.arange(none, dtype=jnp.int32)
            nowhere = jnp.full(count, none, jnp.int32)
            first = nowhere.at[at].min(number, mode="drop")
            last = (nowhere * 0 - 1).at[at].max(number, mode="drop")
            last = jnp.where(last > first, last, none)
            once, again = (
                x.at[place].get(mode="fill", fill_value=0).astype(jnp.float32)
                for place in (first, last)
            )
            return once + again

        return _in_rows(of_row, x, self.tokens)


def in_rows(starts, tokens: int):
    """Return starts of rows, one behind the other: int32 (B, n) to (B * n,).

    Between two rows lies a sequence without queries.
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
    """The hops of other ranks' keys, of a ring, in one call.

    Args:
      way: FEWEST, FEW or MANY: how many tokens are sent and computed.
      found: what a table says of this rank in that way.
      size: number of ranks.
      tokens: how many a rank has in a row.
      longest: the most queries and keys of a sequence, or None.
    """

    def __init__(self, way: int, found: Few, size: int, tokens: int, longest=None):
        self.count, self.longest = few(tokens, way), longest
        self.queries, self.keys = (
            Part(slice(None) if way == MANY else _tokens_of(x, self.count))
            for x in (found.queries, found.keys)
        )
        some = listed(self.count, size)
        self.listed = Listed(_tokens_of(found.listed, some))
        counts = self.count, some
        self.starts = Starts(
            *(in_rows(found.starts[:, i], n) for i, n in enumerate(counts))
        )

    def start(self, loop):
        sent = [self.keys.of(x) for x in loop.own_block[:2]]
        return all_gather_start(sent, loop.call.axis_name, axis=1, tiled=True)

    def home(self, loop, grads):
        size, dtype = loop.call.size, loop.inputs.query.dtype
        grads = [self.listed.summed(x, size * self.count).astype(dtype) for x in grads]
        found = all_to_all(grads, loop.call.axis_name, 1, 1, tiled=True)
        return [jnp.split(x, size, axis=1) for x in found]

    def hop(self, loop, keys):
        """Return the hop of the queries that see, and of the keys listed for them.

        For a kernel that does not know packed sequences a sequence is a document.
        """
        query, starts = self.queries.of(loop.inputs.query), self.starts
        keys = [self.listed.of(x) for x in keys]
        batch, *_ = keys[0].shape
        counts = query.shape[1], keys[0].shape[1]
        queries, of_keys = (
            _numbers_in(x, batch, count)
            for x, count in zip(starts, counts, strict=True)
        )
        whole = (0, counts[0]), (0, counts[1])
        run = Run(*whole, "apart", False, starts, self.longest)
        return loop.others.replace(
            query=query,
            key=keys[0],
            value=keys[1],
            pairs=Pairs(
                mask=Mask(None, None, 1, 1),
                queries=queries,
                keys=of_keys,
                segments=(counts[:1], counts[1:]),
                runs=(run,),
            ),
        )


def _numbers_in(starts, batch: int, count: int) -> Coordinates:
    """Return tokens of which each has the number of its sequence as its document."""
    place = jax.lax.iota(jnp.int32, batch * count)[:, None]
    number = (starts <= place).sum(1, dtype=jnp.int32)
    return Coordinates(jnp.zeros(count, jnp.int32), number.reshape(batch, count))
