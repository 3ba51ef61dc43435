"""What a schedule must say: the positions a rank holds, and nothing else."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.schedules.block import Blocks


class Schedule(abc.ABC):
    """How a sequence of ``size * length`` positions is dealt to ``size`` ranks.

    A subclass never communicates, and two of equal attributes are equal. Masks, skipped
    blocks, the order of ``Layout.reorder`` and the inputs of RoPE are all derived from
    :meth:`positions`.
    """

    name: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items()))))

    def __repr__(self) -> str:
        return repr(self.name)

    @abc.abstractmethod
    def positions(self, rank: Any, size: int, length: int) -> np.ndarray | jax.Array:
        """Return the global positions of the tokens that ``rank`` holds.

        Args:
          rank: int or traced int32 scalar, the index in the ring.
          size: number of ranks in the ring.
          length: number of tokens of each rank, the local length.

        Returns:
          int32 array of shape ``(length,)``; over all ranks every number below
          ``size * length`` appears once. A numpy array if ``rank`` is a Python int.
          Make it of :meth:`tokens`, so that no program holds it as a constant.
        """

    @staticmethod
    def tokens(rank: Any, length: int) -> np.ndarray | jax.Array:
        """Return the numbers 0 to ``length - 1`` of a rank's tokens, int32.

        If ``rank`` is traced, the program computes them. A constant of all tokens would
        take ten bytes for each in the program's text, wherever they are used.
        """
        if compat.is_tracer(rank):
            return jax.lax.iota(jnp.int32, length)
        return np.arange(length, dtype=np.int32)

    def segments(self, length: int) -> tuple[int, ...]:
        """Return the lengths of the parts that a compute tile should not straddle.

        They sum to ``length``. A schedule whose positions jump says where: a tile
        across the jump spans nearly all positions and could never be skipped.
        """
        return (length,)

    def blocks(self, length: int) -> Blocks | None:
        """Return what a rank computes of each hop under a causal mask.

        A fused kernel has few masks; a schedule whose hops need no other says here
        where. It must agree with :meth:`positions` for every number of ranks. If None,
        hops are computed from the positions, without such a kernel.

        Args:
          length: number of tokens of each rank, none of them padding.
        """
        return None

    def local_length(self, size: int, length: int) -> int:
        """Return how many tokens each rank holds of a sequence of ``length`` tokens."""
        return -(-length // size)

    def shard(self, size: int, length: int) -> np.ndarray:
        """Return the global position of each token in rank order.

        Args:
          size: number of ranks in the ring.
          length: number of tokens of each rank.

        Returns:
          int32 array of shape ``(size * length,)``: ``x[shard]`` puts the tokens of
          rank 0 first, then those of rank 1, and so on.
        """
        if size * length == 0:
            return np.zeros(0, np.int32)
        return np.concatenate([self.positions(r, size, length) for r in range(size)])

    def unshard(self, size: int, length: int) -> np.ndarray:
        """Return the inverse of :meth:`shard`, an int32 array of the same shape."""
        return np.argsort(self.shard(size, length)).astype(np.int32)
