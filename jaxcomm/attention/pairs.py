"""Which pairs of a query and a key a hop has: by positions, or by places in arrays."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxcomm.attention.mask import Coordinates, Mask

_NOWHERE = Coordinates(None)


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangle of a hop's queries and keys, by their numbers in the arrays.

    Query i of the rectangle sees its keys ``i - left`` to ``i + right``. Where a bound
    is None there is none. Either may be negative: they hold the distance between the
    first query and the first key.

    Attributes:
      queries: first query and the one behind the last.
      keys: the same for the keys.
      left: how many keys before its own number a query sees.
      right: how many keys after it. A causal square has ``right=0``.

    >>> Block((2, 4), (0, 4)).is_empty
    False
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        if min(self.shape) < 0:
            raise ValueError(
                f"Block: queries {self.queries} and keys {self.keys}. Pass ranges that "
                "do not end before they start."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """How many queries and how many keys it has."""
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def is_empty(self) -> bool:
        """Whether it has no query or no key."""
        return 0 in self.shape

    @property
    def is_whole(self) -> bool:
        """Whether each query sees every key."""
        return self.left is None and self.right is None


@dataclasses.dataclass(frozen=True)
class Run:
    """Queries of a hop, and all keys that they see, by their numbers in the arrays.

    The positions of both ascend, in each document.

    Attributes:
      queries: first query and the one behind the last.
      keys: the same for the keys.
      are: ``"same"``: they are the same tokens. ``"among"``: the queries are among the
        keys, and no position is left out. Of n keys the last has its own position, and
        key j one less for each key behind it. Where that is negative the key is not
        seen. ``"apart"``: they have no token in common. ``"behind"``: the keys are all
        that lie directly before the queries in a window.
      is_consecutive: whether positions of the queries leave none out.
      starts: where its documents begin, as FlashAttention takes them; or None, if
        nobody has looked.
      longest: the most queries and keys of a document; or None, if they may be all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    are: Literal["same", "among", "apart", "behind"] = "among"
    is_consecutive: bool = True
    starts: Any = None
    longest: tuple[int, int] | None = None


jax.tree_util.register_dataclass(
    Run, ["starts"], ["queries", "keys", "are", "is_consecutive", "longest"]
)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of a query and a key it sees, in the forms that kernels take.

    By positions and documents they are always known. By places in the arrays they are
    where there are blocks or runs. A pytree of arrays.

    Attributes:
      mask: which keys a query sees, by positions.
      queries: positions int32 (T,), or (B, T) if sequences differ; segment ids int32
        (B, T), or None; and the range of keys that each may see, or None.
      keys: the same of S keys.
      segments: lengths of the parts that a tile should not straddle, of the queries
        and of the keys.
      blocks: for kernels that set ``by_blocks``: the queries see one of these. Empty if
        no such kernel may compute the hop.
      block: int32 scalar, which of the blocks it is. If None, the only one.
      runs: for kernels that set ``by_runs``: all queries, in their order, and the keys
        that they see. Empty if they are no runs, or no such kernel may compute the hop.
    """

    mask: Mask
    queries: Coordinates = _NOWHERE
    keys: Coordinates = _NOWHERE
    segments: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    blocks: tuple[Block, ...] = ()
    block: Any = None
    runs: tuple[Run, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether somebody has looked where documents begin."""
        return any(run.starts is not None for run in self.runs)

    @property
    def has_shared_tokens(self) -> bool:
        """Whether all sequences of the batch have the same tokens."""
        return self.queries.is_shared and self.keys.is_shared

    @property
    def differs_by_row(self) -> bool:
        """Whether sequences of the batch differ in their positions."""
        return any(x.positions.ndim > 1 for x in (self.queries, self.keys))

    def allowed(self) -> jax.Array:
        """Return which keys each query sees, bool (B or 1, T, S), without the bias."""
        queries, keys = (
            jax.tree.map(jnp.atleast_2d, x) for x in (self.queries, self.keys)
        )
        return self.mask.allowed(queries.expanded(2), keys.expanded(1))


jax.tree_util.register_dataclass(
    Pairs, ["queries", "keys", "block", "runs"], ["mask", "segments", "blocks"]
)
