"""Which part of a hop's scores is computed, where that is known before it runs."""

import dataclasses


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
class Blocks:
    """What a rank computes of a hop, by whose keys it holds.

    Attributes:
      same: with its own keys.
      earlier: with the keys of a rank whose first position is before its own first.
      later: with those of a rank whose first position is behind it.
    """

    same: Block
    earlier: Block
    later: Block
