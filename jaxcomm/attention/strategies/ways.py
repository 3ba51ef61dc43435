"""What a look at documents finds: in which way a pass computes, and their pieces."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.pieces import Pieces, Starts
from jaxcomm.attention.layout import positions_here
from jaxcomm.attention.mask import Coordinates
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs
from jaxcomm.collectives.all_reduce import psum


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
        tokens = Coordinates(
            positions_here(inputs.query_layout, rank), inputs.query_ids
        )
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
def over_batch(way):
    """Return the largest way of a batch: under vmap all sequences go one way."""
    return way


@over_batch.def_vmap
def _(axis_size, is_batched, way):
    return over_batch(way.max(0) if is_batched[0] else way), False
