"""What a strategy is: what travels between the ranks, and nothing else."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved
from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.kernels.selection import may_round
from jaxcomm.attention.layout import Layout, of_all_ranks
from jaxcomm.attention.mask import Coordinates, Mask, Range
from jaxcomm.attention.pairs import Pairs
from jaxcomm.attention.permutation import poison_unless
from jaxcomm.attention.table import Sizes
from jaxcomm.primitives.call import Scope

KEPT = "jaxcomm_attention"
# An id that others hardly have.
_NO_DOCUMENT = jnp.iinfo(jnp.int32).max


def keep(tree):
    """Name the arrays of a pytree, so that a policy can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), tree)


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
      has_bias: whether there is a bias or a mask. Its bytes are not counted.
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
    has_bias: bool = False

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
    def rows(self) -> int:
        """Rows of one rank: its queries, times heads."""
        return self.batch * self.query_layout.local_length * self.heads

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys and values of one rank, with their segment ids."""
        return self.key_bytes + self.id_bytes(self.key_layout)

    def id_bytes(self, layout: Layout) -> int:
        """Return the bytes of one rank's segment ids."""
        return self.has_documents * 4 * self.batch * layout.local_length


class Inputs(NamedTuple):
    """The arrays of one rank.

    Attributes:
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype.
      value: (B, S, K, V) of the same dtype.
      query_ids: int32 (B, T), segment ids of the queries, or None.
      key_ids: int32 (B, S), those of the keys, or None.
      bias: (B, N, T, size * S), with its last dimension in rank order, or None.
      slopes, seeds: as in ``Scores``.
      query_layout, key_layout: who holds which positions.
      is_right: bool scalar, whether this rank holds the tokens that the layouts say; or
        None if it does.
      table: int32 (B, numbers), what is known of documents: see ``table.Table``. Or
        None.
      query_range: which keys each query may see, or None.
      key_range: which queries may see each key, or None.
    """

    query: Any
    key: Any
    value: Any
    query_ids: Any
    key_ids: Any
    bias: Any
    slopes: Any
    seeds: Any
    query_layout: Layout
    key_layout: Layout
    is_right: Any = None
    table: Any = None
    query_range: Range | None = None
    key_range: Range | None = None

    @property
    def keys(self) -> "Keys":
        """Return what may travel."""
        return Keys(self.key, self.value, self.key_ids, self.key_range)

    @property
    def has_ranges(self) -> bool:
        """Whether there is a mask of ranges."""
        return self.query_range is not None or self.key_range is not None

    def gathered(self, call: "AttentionCall") -> "Inputs":
        """Return inputs with layouts that know the order of all ranks' tokens."""
        query, key = (
            of_all_ranks(x, call.axis_name)
            for x in (self.query_layout, self.key_layout)
        )
        key = query if self.query_layout is self.key_layout else key
        return self._replace(query_layout=query, key_layout=key)

    def poisoned(self) -> "Inputs":
        """Return inputs of which wrong tokens make results NaN, where they are seen.

        Nothing of wrong tokens is padding by its segment ids: each sees its own key.
        """
        if self.is_right is None:
            return self

        def none_is_padding(ids):
            if ids is None:
                return None
            return jnp.where(self.is_right | (ids >= 0), ids, _NO_DOCUMENT)

        return self._replace(
            key=poison_unless(self.is_right, self.key),
            query_ids=none_is_padding(self.query_ids),
            key_ids=none_is_padding(self.key_ids),
            is_right=None,
        )


class Keys(NamedTuple):
    """What travels: (B, S, K, D), (B, S, K, V), and int32 (B, S) or None."""

    key: Any
    value: Any
    segment_ids: Any
    range: Range | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What a call knows before it sees an array.

    Attributes:
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      size: its size.
      hop: what its hops have in common, without arrays.
      strategy: what travels.
      scope: the lane and the backend of the call, for both passes: collectives of a
        strategy name none.
      bias_dtype: of the bias, if there is one.
      is_self: whether the keys are of the same tokens as the queries.
      has_ranges: whether there is a mask of ranges.
      way: what is sent of documents: see ``Tokens.agreed``. If None, a table says it.
      sizes: what kernels are told of documents, or None if nothing is known.
    """

    axis_name: Any
    size: int
    hop: Hop
    strategy: "Strategy"
    scope: Scope = dataclasses.field(default_factory=Scope)
    bias_dtype: str | None = None
    is_self: bool = False
    has_ranges: bool = False
    way: int | None = None
    sizes: Sizes | None = None

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return self.hop.pairs.mask

    def scores(self, inputs: Inputs, bias) -> Scores:
        """Return those of a hop with a bias of its own, or None."""
        own = {"bias": bias, "slopes": inputs.slopes, "seeds": inputs.seeds}
        return self.hop.scores.replace(**own)

    def rank(self):
        """Return the index of this rank."""
        return jax.lax.axis_index(self.axis_name)


def rounded(call: AttentionCall, inputs: Inputs, out):
    """Round an output to the dtype of the queries.

    Returns:
      The output, and what rounding took from it in the same dtype; or None for that,
      where nothing was taken or a kernel has rounded before.
    """
    dtype = inputs.query.dtype
    if out.dtype == dtype:
        return out, None
    pairs = Pairs(
        call.mask,
        queries=Coordinates(None, inputs.query_ids, inputs.query_range),
        keys=Coordinates(None, inputs.key_ids, inputs.key_range),
    )
    hop = call.hop.replace(scores=call.scores(inputs, inputs.bias), pairs=pairs)
    found = out.astype(dtype)
    if may_round(hop):
        return found, None
    return found, (out - found.astype(out.dtype)).astype(dtype)


def inner(grad_out, out, lost, dtype):
    """Return the sums of ``grad_out * out`` over V, of an output before rounding.

    The gradient of a score is small where those of a row's scores are alike: it is the
    difference of two numbers that are not. A rounded output has errors in one of them,
    which all keys of the row get, and which the gradient of the query adds up.

    Args:
      out, lost: what :func:`rounded` returned.
      dtype: of sums.
    """
    grad_out, out = grad_out.astype(dtype), out.astype(dtype)
    if lost is not None:
        out += lost.astype(dtype)
    return (grad_out * out).sum(-1)


class Cost(NamedTuple):
    """What a strategy sends and holds, per rank.

    Attributes:
      sends: collectives of a forward pass that follow one another.
      forward_bytes, backward_bytes: sent, with segment ids. Not what ranks tell each
        other of documents before a ring, nor a bias, which Ulysses sends.
      memory: bytes of keys and values held at once, forward.
      overlaps: whether it computes while it sends.
      width: how many ranks share the work of their queries equally.
      steps: of a pass, one after another: attentions of two blocks, and what arranges
        arrays or merges results.
      hops: blocks of other ranks' keys that are computed one after another.
    """

    sends: int
    forward_bytes: float
    backward_bytes: float
    memory: float
    overlaps: bool = False
    width: int = 1
    steps: int = 3
    hops: int = 0


class Strategy(abc.ABC):
    """How the keys and values of all ranks reach the queries of each.

    A subclass is a frozen dataclass of Python values. It computes with ``hop_forward``
    and ``hop_backward``, which sum in float32; it sends gradients in float32 where they
    are still to be summed. Sinks, casts and ``jax.custom_vjp`` are not its business.

    Attributes:
      name: an identifier.
      judges: whether it makes results of wrong tokens NaN, by ``Inputs.is_right``, and
        asks for the order of others' tokens where it needs that. Else it is given
        inputs that are poisoned and gathered.
    """

    name: ClassVar[str]
    judges: ClassVar[bool] = False

    def why_not(self, problem: Problem) -> str | None:
        """Say why it cannot compute this, as words after "but"; None if it can."""
        return None

    def cost(self, problem: Problem) -> Cost:
        """Return what it sends and holds; for comparisons and ``"auto"``."""
        raise NotImplementedError(f"The strategy {self.name!r} does not say its cost.")

    @abc.abstractmethod
    def forward(
        self, call: AttentionCall, inputs: Inputs
    ) -> tuple[tuple[Any, Any], Any]:
        """Attend.

        Returns:
          (out, lse), kept: float32 (B, T, N, V) and (B, T, N), or float64; and a pytree
          for :meth:`backward`.
        """

    @abc.abstractmethod
    def backward(self, call: AttentionCall, kept: Any, saved: Saved) -> Grads:
        """Return the gradients, shaped as the inputs, in the dtype of sums."""


def coordinates_of(layout: Layout, rank, width: int, *known) -> Coordinates:
    """Return the tokens of ``width`` ranks from ``rank * width`` on, in rank order.

    Args:
      known: of them besides, as in ``Coordinates``: segment ids, and a range.
    """
    if width == 1 and compat.is_tracer(rank):
        return Coordinates(layout.positions_of(rank), *known)
    # Mapped, so that the program computes them: of a known rank they are a constant.
    ranks = rank * width + jax.lax.iota(jnp.int32, width)
    held = jnp.moveaxis(jax.vmap(layout.positions_of)(ranks), 0, -2)
    return Coordinates(held.reshape(*held.shape[:-2], -1), *known)


def columns_of(bias, start, count: int):
    """Return the columns of a bias for a block of keys; None of None."""
    if bias is None:
        return None
    return jax.lax.dynamic_slice_in_dim(bias, start, count, axis=3)
