"""A part of each row's tokens, to which other results are added."""

from typing import Any, NamedTuple

import jax

from jaxcomm.attention.kernels.kernel import merge

_ONCE: Any = {
    "unique_indices": True, "mode": "promise_in_bounds",
}  # fmt: skip


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
