"""Keys that come in one send while a rank computes its own: one call more."""

import abc
from typing import Any, NamedTuple

import jax

from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.strategies.loop import Loop, completion

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
