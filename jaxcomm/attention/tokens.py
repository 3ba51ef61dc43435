"""Which tokens of a sequence an array holds."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.permutation import checked, places_of, take
from jaxcomm.attention.table import MANY, NONE, Sizes, way_of
from jaxcomm.communicator import rendezvous
from jaxcomm.communicator.backends.backend import processes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Which tokens of a sequence an array holds: what ``Layout.reorder`` returns.

    Hand it to all that ask for the tokens of a batch: ``ring_attention``,
    ``relayout``, :meth:`restore`; ``tokens.positions`` to RoPE. It is a pytree of
    arrays, of shape (B, T) but for the table. Pass it through ``jax.jit`` like other
    data, and through ``jax.shard_map`` with the spec of the batch's first two
    dimensions.

    Attributes:
      layout: of the sequence. Of a :func:`document_layout` it holds the shape of
        ``order`` alone: the numbers are in the positions.
      positions: int32 (B, T) or (T,): the position of each token, -1 for padding.
      segment_ids: int32 of that shape, the document of each token, negative for
        padding. If None, all tokens are of one document.
      table: int32 (B, ranks * some), what ranks see of each other's documents. It is
        made of numpy arrays alone, and without it programs for GPUs look at the ids.
        Tokens with other ids need another: give ``reorder`` the ids, or leave it None.
      way: what is sent of documents, part of the pytree's structure: see
        :meth:`agreed`. If None, programs for GPUs ask the table.
      sizes: what kernels are told of documents, likewise.
    """

    layout: Any
    positions: Any
    segment_ids: Any = None
    table: Any = None
    way: int | None = None
    sizes: Sizes | None = None

    def agreed(self, mesh: jax.sharding.Mesh | None = None) -> "Tokens":
        """Return tokens of which programs know what is sent of their documents.

        A program for GPUs otherwise reads the table in each layer and pass, and the
        host waits for that. Here there is nothing to choose: it has no branch. It also
        compiles in less time. There are four answers: nothing; an eighth or a fourth of
        the keys; all. Programs also know whether a rank has more than 16 documents,
        and whether one has more than a fourth of its tokens; where all keys are sent,
        also whether one sees more than a fourth of them; and whether the numbers of
        documents ascend. ``jax.jit`` compiles a program for each answer that comes.
        Call it in the data pipeline, on what :meth:`Layout.reorder` returned.

        Args:
          mesh: of the programs. If it spans processes, all of them must call this as
            often, in one order: they agree on the answer that serves all. If None, all
            devices are of this process.

        Returns:
          The same tokens, with a ``way`` and ``sizes``; without them where they have no
          table, or documents for which there is none. If the table or the documents are
          changed later so that more is seen, attention and its gradients are NaN.

        Raises:
          CommunicatorError: another process did not call within ``JAXCOMM_TIMEOUT``.
          TypeError: ``mesh`` is no mesh, or the table is not an array of this process:
            it is traced, or split over several.

        >>> layout = jaxcomm.Layout("contiguous", 2, 4)
        >>> _, tokens = layout.reorder(
        ...     np.zeros((1, 4)), segment_ids=np.array([[0, 0, 1, 1]]))
        >>> tokens.agreed().way
        0
        """
        if not (mesh is None or isinstance(mesh, jax.sharding.Mesh)):
            raise TypeError(
                f"Tokens.agreed: mesh must be a jax.sharding.Mesh, got {mesh!r}. Pass "
                "that of your programs, or nothing if this process has all its devices."
            )
        way, sizes = NONE, Sizes(0, 0, 0)
        if self.table is not None:
            is_here = not compat.is_tracer(self.table)
            if not (is_here and getattr(self.table, "is_fully_addressable", True)):
                raise TypeError(
                    "Tokens.agreed: the table is traced, or split over processes. Call "
                    "it on the tokens that Layout.reorder returned."
                )
            table, of = np.asarray(self.table), self.layout
            way = way_of(table, of.size)
            sizes = Sizes.of(table, of.size, of.local_length)
        if mesh is not None:
            processes = processes_of(mesh)
            me = jax.process_index()
            found = rendezvous.exchange(processes, me, "Tokens.agreed", [way, *sizes])
            way, *most = map(max, zip(*found.values(), strict=True))
            sizes = Sizes(*most)
        if way == NONE:
            return dataclasses.replace(self, way=None, sizes=None)
        if way != MANY:
            sizes = sizes._replace(keys=self.layout.size * self.layout.local_length)
        return dataclasses.replace(self, way=way, sizes=sizes)

    @property
    def is_padding(self) -> Any:
        """Which tokens are padding, bool in the shape of the positions.

        They are what ``reorder`` filled the sequence up with, tokens from ``lengths``
        on, and those whose segment id is negative. Leave all of them out of a loss:

        >>> layout = jaxcomm.Layout("contiguous", 2, 3)
        >>> _, tokens = layout.reorder(jnp.zeros((1, 3)), lengths=2)
        >>> tokens.is_padding
        Array([[False, False,  True,  True]], dtype=bool)

        Raises:
          TypeError: the tokens have no positions.
        """
        if not hasattr(self.positions, "shape"):
            raise TypeError(
                "Tokens.is_padding: these tokens have no positions. Pass a "
                "batch through layout.reorder, whose tokens have them."
            )
        is_added = self.positions < 0
        return (
            is_added if self.segment_ids is None else is_added | (self.segment_ids < 0)
        )

    def restore(self, x: Any, axis: int = 1) -> Any:
        """Undo ``Layout.reorder``: put the tokens of all ranks into natural order.

        Args:
          x: pytree of arrays whose dimension ``axis`` holds the tokens of rank 0, then
            those of rank 1, and so on.
          axis: the dimension that counts tokens.

        Returns:
          A pytree like ``x`` in natural order, without the padding. Where the positions
          are not those of one sequence of ``layout.length`` tokens, all of it is NaN,
          or what ``jax.numpy`` fills other dtypes with; outside of ``jax.jit`` it
          raises.

        Raises:
          ValueError: ``axis`` is out of range; ``x`` or the positions have another
            shape than ``reorder`` gave them, or are of another layout.
          TypeError: ``axis`` is no integer.
        """
        what, layout, positions = "Tokens.restore", self.layout, self.positions
        if not isinstance(positions, jax.Array):
            positions = np.asarray(positions)
        held = layout.size * layout.local_length
        if positions.shape[-1:] != (held,):
            raise ValueError(
                f"{what}: positions of shape {positions.shape}, and the {layout.size} "
                f"ranks of the layout hold {held} tokens. Pass what reorder returned, "
                "padding included."
            )
        places = places_of(positions, layout.length, layout.differs_by_row, what)

        def one(leaf):
            leaf, at = checked(leaf, axis, what)
            if leaf.shape[at] != held:
                raise ValueError(
                    f"{what}: dimension {at} of x has {leaf.shape[at]} tokens, and the "
                    f"{layout.size} ranks of the layout hold {held}. Pass what reorder "
                    "returned, padding included."
                )
            layout._check_rows(leaf, at, what)
            return take(leaf, places, at, fill=None)

        return jax.tree.map(one, x)


def _parts_of_tokens(tokens: Tokens):
    names = ("positions", "segment_ids", "table")
    children = [
        (jax.tree_util.GetAttrKey(name), getattr(tokens, name)) for name in names
    ]
    return children, (tokens.layout, tokens.way, tokens.sizes)


jax.tree_util.register_pytree_with_keys(
    Tokens,
    _parts_of_tokens,
    lambda known, arrays: Tokens(known[0], *arrays, way=known[1], sizes=known[2]),
)
