"""In which way a pass computes: what its documents allow, the same on all ranks.

A GPU's host waits for the tokens to know it: 45 us on an H100. So it asks once in each
pass, for all hops, and the way back asks for what the way forward found.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention import order
from jaxcomm.attention.kernels.flash.pieces import Pieces, Starts
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.selection import is_flash
from jaxcomm.attention.mask import Coordinates
from jaxcomm.attention.permutation import poison
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs, keep
from jaxcomm.collectives.all_reduce import psum

# How many pieces a rank may have: few are tried before many. The kernel looks at as
# many sequences as it is told: backward 64 cost 1.07 and 1,024 cost 1.3 times as much
# as the exact number did (24 documents in 32,768 tokens, one H100).
_FEW, _MANY = 64, 1024
# Where what is sent cannot be part of a way there is one number.
_MIDDLE = 256
# Of all ranks. All pairs of pieces are compared.
_MOST = 8192


class Known(NamedTuple):
    """What is known of the tokens.

    Attributes:
      own: where the sequences of a rank's own keys begin, of each run.
      few: of each measure of what is few; empty where nobody knows.
      seen: what its queries see of the other ranks' keys, by distance; or None.
      every: the pieces of all ranks; or None.
      table: what both follow from, in the branch that reads it; or None.
      beside: where those begin that are computed beside the own, of each run.
    """

    own: tuple[Starts, ...]
    few: tuple = ()
    seen: Any = None
    every: Any = None
    table: Any = None
    beside: tuple[Starts, ...] = ()


class Found(NamedTuple):
    """What a look at the tokens found.

    Attributes:
      way: int32 scalar, the same on all ranks: which way serves. As many as there are
        ways if none does; one more if a rank holds wrong tokens.
      known: of the tokens, which the ways are given.
    """

    way: Any
    known: Known


class Ways:
    """The ways of one pass: those of a kernel that takes documents packed, and others.

    Attributes:
      call, inputs: of what.
      count: how many ways there are.
      is_whole: whether a way is the whole pass, with all that is sent. Else it is a
        part of it: groups of ranks may go different ways, and XLA's collectives wait
        for all.
    """

    def __init__(self, call: AttentionCall, inputs: Inputs, count: int):
        self.call, self.inputs, self.count = call, inputs, count
        axes = call.axis_name
        axes = set(axes if isinstance(axes, tuple) else (axes,))
        self.is_whole = compat.manual_axes() <= axes

    def look(self, look: Callable[[int], Found], most: int | None = None) -> Found:
        """Look at the tokens.

        Args:
          look: takes how many pieces a rank may have.
          most: what it takes. If None, the first that is tried.
        """
        if most is None:
            most = _FEW if self.is_whole else _MIDDLE
        way, known = look(most)
        return keep(Found(_over_batch(way), known))

    def found(self, way, serves, are_wrong=None):
        """Return the number of a way; of another one if it does not serve."""
        way = jnp.where(serves, way, self.count)
        return way if are_wrong is None else jnp.where(are_wrong, self.count + 1, way)

    def take(
        self,
        found: Found,
        ways: Sequence[Callable[[Any], Any]],
        rest: Callable[[], Any],
        look: Callable[[int], Found] | None = None,
        of_many: Sequence[Callable[[Any], Any]] | None = None,
    ):
        """Compute in the way that was found.

        Args:
          ways: each takes what was found. One that is there twice is compiled once.
          rest: computes all documents.
          look: to look for more pieces, where a way is the whole pass.
          of_many: the ways of more pieces. If None, ``ways``.

        Returns:
          What the way returns; where tokens are wrong, what no result is.
        """
        many = min(_MANY, _MOST // self.call.size)

        def more():
            again = self.look(look, many)  # pyright: ignore
            return self.take(again, of_many or ways, rest)

        each = list(dict.fromkeys(ways))
        places = [each.index(way) for way in ways]
        may_look = look is not None and self.is_whole and many > _FEW
        branches: list[Callable[[], Any]] = [
            *(functools.partial(way, found.known) for way in each),
            more if may_look else rest,
            lambda: self._wrong(ways[0], found.known),
        ]
        places += [len(each), len(each) + 1]
        return jax.lax.switch(jnp.asarray(places, jnp.int32)[found.way], branches)

    def _wrong(self, way, known):
        """Return what no result is, in the shapes of a way's results."""
        # An array of this rank: what comes of it differs between ranks too.
        none = self.inputs.query.reshape(-1)[0] * 0

        def wrong(x):
            return jnp.full(x.shape, poison(x.dtype), x.dtype) + none.astype(x.dtype)

        return jax.tree.map(wrong, jax.eval_shape(way, known))


def ways_of(call: AttentionCall, inputs: Inputs, count: int, *hops: Hop) -> Ways | None:
    """Return the ways of hops of documents; None if no kernel takes them packed."""
    if inputs.query_ids is None or not all(map(_is_packed, hops)):
        return None
    return Ways(call, inputs, count)


def _is_packed(hop: Hop) -> bool:
    """Say whether FlashAttention computes the runs of a hop on the GPUs at hand."""
    return bool(hop.runs) and is_flash(hop.packed([()] * len(hop.runs)))


class AllPieces(NamedTuple):
    """The pieces of all ranks.

    Attributes:
      every: of each rank, with a dimension of ranks before.
      are_right: bool scalar, whether all are.
      are_wrong: bool scalar, whether a rank holds other tokens than its layout says.
    """

    every: Pieces
    are_right: Any
    are_wrong: Any

    @classmethod
    def of(cls, call: AttentionCall, inputs: Inputs, most: int) -> "AllPieces":
        """Return them. It costs a sum of some KiB for each rank."""
        rank = call.rank()
        tokens = Coordinates(order.held(inputs.query_layout, rank), inputs.query_ids)
        own, is_right = Pieces.of(tokens, most)
        flags = is_right, True if inputs.is_right is None else inputs.is_right
        flags = jnp.stack([jnp.asarray(x) for x in flags]).astype(jnp.int32)
        sent = jnp.append(jnp.stack(own).reshape(-1), flags)
        table = jnp.zeros_like(sent, shape=(call.size, len(sent))).at[rank].set(sent)
        table = psum(table, call.axis_name)
        every = table[:, :-2].reshape(call.size, len(own), most)
        are_right, are_held = (table[:, -2:] > 0).all(0)
        return cls(Pieces(*jnp.moveaxis(every, 1, 0)), are_right, ~are_held)

    def at(self, rank) -> Pieces:
        """Return the pieces of a rank, or of several."""
        return jax.tree.map(lambda x: x[rank], self.every)


@jax.custom_batching.custom_vmap
def _over_batch(way):
    """Return the largest way of a batch: under vmap all sequences go one way."""
    return way


@_over_batch.def_vmap
def _(axis_size, is_batched, way):
    return _over_batch(way.max(0) if is_batched[0] else way), False
