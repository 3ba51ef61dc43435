"""Which part of a hop's scores a causal ring computes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangle of local queries and keys, for a kernel without masks of its own.

    Attributes:
      queries: first local query and the one behind the last.
      keys: the same for the keys.
      is_causal: whether query i of the rectangle sees only its keys 0 to i, as many
        queries as keys. Otherwise each query sees every key.
      left: if causal, how many keys before its own a query sees. If None, all of them.

    >>> Block((2, 4), (0, 4)).is_empty
    False
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool = False
    left: int | None = None

    def __post_init__(self):
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        if min(rows, columns) < 0 or (self.is_causal and rows != columns):
            raise ValueError(
                f"Block: queries {self.queries} and keys {self.keys} with is_causal="
                f"{self.is_causal}. Pass ranges that do not end before they start, of "
                "equal length if causal."
            )
        if self.left is not None and not self.is_causal:
            raise ValueError(
                f"Block: left={self.left} without is_causal=True. Pass windows "
                "with causal blocks only."
            )

    @property
    def is_empty(self) -> bool:
        return self.queries[0] == self.queries[1] or self.keys[0] == self.keys[1]


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
