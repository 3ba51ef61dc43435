"""The size of an attention: what strategies are judged by, without any array."""

import dataclasses

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call's shapes.

    Attributes:
      query_layout, key_layout: who holds which positions.
      mask: which keys a query sees; documents are not known to it.
      has_documents: whether a query sees its document alone. Their lengths are not
        known: ranks are taken to have equal work.
      batch: sequences of each rank.
      heads, key_heads: query heads, and key heads, which divide them.
      head_size: of queries and keys.
      value_size: of values and output.
      itemsize: bytes of a number.
      axis_sizes: of the mesh axes that split the sequence, in their order.
    """

    query_layout: Layout
    key_layout: Layout
    mask: Mask
    has_documents: bool
    batch: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    itemsize: int
    axis_sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.key_layout.size

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values of one rank."""
        tokens = self.batch * self.key_layout.local_length * self.key_heads
        return tokens * (self.head_size + self.value_size) * self.itemsize

    @property
    def key_grad_bytes(self) -> int:
        """Bytes of their gradients, in the dtype of sums."""
        return self.key_bytes // self.itemsize * max(self.itemsize, 4)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries and of the output of one rank."""
        tokens = self.batch * self.query_layout.local_length * self.heads
        return tokens * (self.head_size + self.value_size) * self.itemsize
