"""What a kernel is: it computes one hop, forward and backward."""

import abc
from typing import Any, ClassVar

from jaxcomm.attention.kernels.hop import Grads, Hop, Saved
from jaxcomm.attention.merge import merge

# What a kernel says it honours, and what messages call it.
OPTIONS = {
    "segment_ids": "segment ids or lengths",
    "bias": "a bias or mask",
    "alibi_slopes": "alibi_slopes",
    "dropout_rate": "dropout",
    "logits_soft_cap": "logits_soft_cap",
}


class Kernel(abc.ABC):
    """What computes the hops of every strategy: pass one as ``implementation=``.

    A program is compiled for a kernel, so a kernel is hashable, and equal to another
    that computes the same. Make a subclass a frozen dataclass of Python values.

    Attributes:
      name: an identifier, which ``kernels_of`` returns.
      options: what it honours beside the mask: names of ``"segment_ids"``, ``"bias"``,
        ``"alibi_slopes"``, ``"dropout_rate"``, ``"logits_soft_cap"``. A call with
        another option is refused.
      by_blocks: whether it has no masks of positions, and computes one of
        ``hop.blocks``. A call whose hops are no such blocks is refused.
      by_runs: whether it also computes ``hop.runs``, where there are no blocks.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    by_blocks: ClassVar[bool] = False
    by_runs: ClassVar[bool] = False

    @abc.abstractmethod
    def why_not(self, hop: Hop) -> str | None:
        """Say why it cannot compute a hop, as words after "but"; None if it can.

        It is asked when a call is traced, where ``hop.platform`` is None, and again
        when the program is lowered for a platform. Arrays have a shape and a dtype
        alone. What it refuses when traced it refuses for every platform.
        """

    @abc.abstractmethod
    def forward(self, hop: Hop) -> tuple[Any, Any]:
        """Attend over the keys of the hop.

        Returns:
          (out, lse): (B, T, N, V) floating, divided by the sum of the weights, and (B,
          T, N) in ``hop.sum_dtype``, the logarithm of the sum of ``exp(score)``. Rows
          that see no key give 0 and -inf. Dropout thins the weights of ``out`` alone.
        """

    @abc.abstractmethod
    def backward(self, hop: Hop, saved: Saved) -> Grads:
        """Return what the keys of the hop contribute to the gradients.

        The weight of a score is ``exp(score - saved.lse)``; the gradient of a score is
        ``weight * (grad_out . value - delta)``.

        Returns:
          Gradients in the shapes of query, key and value; and of bias and slopes, if
          they are given. Any floating dtype: jaxcomm sums them in ``hop.sum_dtype``.
        """

    def forward_onto(self, hop: Hop, merged: tuple[Any, Any]) -> tuple[Any, Any]:
        """Attend, and merge with what other keys gave; a kernel may do both at once.

        Args:
          hop: as in :meth:`forward`.
          merged: (out, lse) over other keys, in ``hop.sum_dtype``.
        """
        return merge(*merged, *self.forward(hop))

    def backward_onto(self, hop: Hop, saved: Saved, total: Any) -> Grads:
        """Return the gradients, with that of the queries added to ``total``."""
        found = Grads(*self.backward(hop, saved))
        return found._replace(query=total + found.query)
