"""Which collectives of a compiled program are jaxcomm's, and which are XLA's."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

# A split-phase collective has two calls and counts once: jaxcomm.done is not counted.
_OURS = re.compile(r'custom_call_target="jaxcomm\.(?!done")(\w+)')
# The end of an asynchronous one, as in all-reduce-done, is not counted.
_XLA = re.compile(
    r"[ )](all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter"
    r"|collective-\w+)(?:-start)?\("
)


@dataclasses.dataclass(frozen=True, repr=False)
class CollectiveCounts:
    """The collectives of a compiled program.

    A collective inside a loop counts once.

    Attributes:
      ours: how many calls of jaxcomm, by collective, as ``{"all_reduce": 2}``.
      xla: how many collectives of XLA, by operation, as ``{"all-reduce": 1}``.
    """

    ours: Mapping[str, int]
    xla: Mapping[str, int]

    @property
    def totals(self) -> tuple[int, int]:
        """How many collectives are ours, and how many XLA's."""
        return sum(self.ours.values()), sum(self.xla.values())

    def __str__(self) -> str:
        """Say both totals."""
        ours, xla = self.totals
        return f"{ours} calls of jaxcomm, {xla} collectives of XLA"

    def __repr__(self) -> str:
        """Say both totals, and of what they are."""
        counts = {**self.ours, **self.xla}
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"<{self}{named and ': '}{named}>"


def collectives_of(compiled: Any) -> CollectiveCounts:
    """Count the collectives of a compiled program: ours, and XLA's.

    XLA's come from ``jax.lax``, from shardings that XLA resolves, from
    ``backend="xla"``, and from ``jax.shard_map``, which sums gradients of replicated
    inputs unless they went through :func:`jaxcomm.pcast`.

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its ``as_text()``.

    Raises:
      TypeError: if the program is not compiled, so that XLA's are not there yet.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.psum(x, "context"),
      ...     in_specs=jax.P("context"),
      ...     out_specs=jax.P(),
      ... )
      >>> compiled = jax.jit(f).lower(jnp.arange(4.0)).compile()
      >>> jaxcomm.collectives_of(compiled)
      <1 calls of jaxcomm, 0 collectives of XLA: 1 all_reduce>
      >>> print(jaxcomm.collectives_of(compiled))
      1 calls of jaxcomm, 0 collectives of XLA
    """
    is_compiled = hasattr(compiled, "as_text") and hasattr(compiled, "cost_analysis")
    if not isinstance(compiled, str) and (
        not is_compiled or hasattr(compiled, "compile")
    ):
        raise TypeError(
            f"collectives_of: expected a compiled program, got "
            f"{type(compiled).__name__}. Pass jax.jit(f).lower(...).compile()."
        )
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    return CollectiveCounts(
        dict(collections.Counter(_OURS.findall(text))),
        dict(collections.Counter(_XLA.findall(text))),
    )
