"""Which positions of a sequence each rank holds: the rules, by name."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.pairs import Block


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

    def blocks(self, length: int) -> tuple[Block, Block, Block] | None:
        """Return what a rank computes of each hop under a causal mask.

        A fused kernel has few masks; a schedule whose hops need no other says here
        where. It must agree with :meth:`positions` for every number of ranks. If None,
        hops are computed from the positions, without such a kernel.

        Args:
          length: number of tokens of each rank, none of them padding.

        Returns:
          What it computes with its own keys; with those of a rank whose first position
          is before its own first; and with those of a rank whose first is behind it.
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


class Contiguous(Schedule):
    """One unbroken slice per rank.

    No reordering is needed and a sliding window reaches only the nearest ranks. Under a
    causal mask the last rank computes in every hop and the first in one only, so the
    ring takes about twice as long as with a balanced schedule.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

    >>> Contiguous().positions(1, 4, 4)
    array([4, 5, 6, 7], dtype=int32)
    """

    name = "contiguous"

    def positions(self, rank, size, length):
        return rank * length + self.tokens(rank, length)

    def blocks(self, length):
        whole = (0, length)
        nothing = Block((0, 0), (0, 0))
        return Block(whole, whole, right=0), Block(whole, whole), nothing


class Striped(Schedule):
    """Tokens dealt one by one, like cards.

    Under a causal mask every hop is a causal or strictly causal square, so ranks are
    balanced up to one diagonal, but every tile on the diagonal of every hop needs a
    mask; zigzag needs it in the first hop only.

    Source: Brandon et al., Striped Attention, 2023.

    >>> Striped().positions(1, 4, 4)
    array([ 1,  5,  9, 13], dtype=int32)
    """

    name = "striped"

    def positions(self, rank, size, length):
        return rank + size * self.tokens(rank, length)

    def blocks(self, length):
        causal = Block((0, length), (0, length), right=0)
        # Strictly causal: causal if the first query and the last key are left out.
        strictly = Block((1, length), (0, length - 1), right=0)
        return causal, causal, strictly


class Zigzag(Schedule):
    """One slice from the front half and its mirror image from the back half.

    Under a causal mask every rank does the same work in every hop, and no hop but the
    first needs a mask inside a tile. The local length may be odd: then the front slice
    is one token longer than the back slice.

    Source: Zhu, ring-flash-attention, zigzag variant, 2024; used by Llama 3.

    >>> Zigzag().positions(1, 4, 4)
    array([ 2,  3, 12, 13], dtype=int32)
    """

    name = "zigzag"

    def segments(self, length):
        return (length - length // 2, length // 2)

    def positions(self, rank, size, length):
        front, back = self.segments(length)
        token = self.tokens(rank, length)
        start = size * front + (size - 1 - rank) * back - front
        if isinstance(token, np.ndarray):
            return token + np.where(token < front, rank * front, start).astype(np.int32)
        # Two ranges side by side: XLA would make a choice for each token anew.
        first, second = token[:front] + rank * front, token[front:] + start
        return jnp.concatenate([first, second])

    def blocks(self, length):
        front, _ = self.segments(length)
        whole = (0, length)
        earlier, later = Block(whole, (0, front)), Block((front, length), whole)
        return Block(whole, whole, right=0), earlier, later


# A new schedule is one file and one entry here.
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Contiguous(),
        Striped(),
        Zigzag(),
    )
}


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule of that name, or the argument if it is one already.

    >>> get_schedule("zigzag").name
    'zigzag'
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule={schedule!r} is of type {type(schedule).__name__}. Pass one of "
            f"{', '.join(map(repr, SCHEDULES))} or an instance of Schedule."
        )
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule={schedule!r} is not known. Pass one of "
            f"{', '.join(map(repr, SCHEDULES))}, or an instance of Schedule."
        )
    return SCHEDULES[schedule]
