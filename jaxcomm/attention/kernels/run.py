"""Queries and the keys that they see, where both are in the order of positions."""

import dataclasses
from typing import Literal


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
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    are: Literal["same", "among", "apart", "behind"] = "among"
    is_consecutive: bool = True
