"""What a kernel of a recurrent layer is, and what it is given."""

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import sum_dtype
from jaxcomm.attention.state.maps import StateMap, varying_like


@dataclasses.dataclass(frozen=True)
class StateRows:
    """Equal pieces of sequences, each in consecutive tokens: what a kernel is given.

    A pytree of arrays. Padding is neutral: zeros in all of them.

    Attributes:
      query, key: (P, L, N, K), of one floating dtype: P pieces of L tokens, N heads.
      value: (P, L, N, V), of that dtype.
      gate: (P, L, N) or (P, L, N, K), in the dtype of sums, the logarithm of the decay,
        -60 or more.
      beta: (P, L, N) in the dtype of sums, how much a token writes; or None.
      begins: bool (P, L), whether a document begins with the token. It sees no state
        from before.
      scale: factor on the queries.
    """

    query: Any
    key: Any
    value: Any
    gate: Any
    beta: Any
    begins: Any
    scale: float = 1.0

    def replace(self, **changed: Any) -> "StateRows":
        """Return rows with other attributes."""
        return dataclasses.replace(self, **changed)

    @property
    def sum_dtype(self):
        """The dtype of states, gates and sums."""
        return sum_dtype(self.query.dtype)

    def zeros(self, *last: int) -> Any:
        """Return zeros of shape ``(P, N, *last)``, in the dtype of sums."""
        pieces, _, heads, _ = self.key.shape
        zeros = jnp.zeros((pieces, heads, *last), self.sum_dtype)
        return varying_like(zeros, self.value)


_ARRAYS = ["query", "key", "value", "gate", "beta", "begins"]
jax.tree_util.register_dataclass(StateRows, _ARRAYS, ["scale"])


class StateKernel(abc.ABC):
    """What computes the pieces of a recurrent layer: ``kernel=`` of ``state_scan``.

    The state of a head is S, (K, V), and a token's output is ``scale * S^T query``,
    after the token changed S. A kernel of your own defines :meth:`run`, which
    ``jax.vjp`` differentiates. The other methods follow from it, and are there to be
    replaced by what is faster: a kernel that keeps its work from :meth:`summary` on
    does it once. A program is compiled for a kernel, so a kernel is hashable: make it a
    frozen dataclass of Python values.

    Attributes:
      name: an identifier, for messages.
      state: ``"matrix"`` if a token multiplies the state by a matrix, ``"diagonal"`` if
        by its decay alone.
      gates: whether a token has a gate for each ``"head"``, or for each ``"key"``
        channel of it.
      has_beta: whether it takes ``beta``.
      chunk: pieces have a multiple of so many tokens.
    """

    name: ClassVar[str]
    state: ClassVar[Literal["matrix", "diagonal"]]
    gates: ClassVar[Literal["head", "key"]] = "head"
    has_beta: ClassVar[bool] = False
    chunk: int = 64

    @abc.abstractmethod
    def run(self, rows: StateRows, state: Any, kept: Any = None) -> tuple[Any, Any]:
        """Run over the tokens of each piece, from the state before it.

        Args:
          rows: the pieces.
          state: (P, N, K, V), in the dtype of sums.
          kept: what :meth:`summary` kept. If None, it was not asked.

        Returns:
          (out, state): (P, L, N, V) in any floating dtype, and the state behind each
          piece, as it was given.
        """

    def summary(self, rows: StateRows) -> tuple[StateMap, Any]:
        """Return what each piece does to the state before it, and what to keep.

        Returns:
          (map, kept): the arrays of the map begin with (P, N); a pytree of arrays that
          the other methods get, of any shape.
        """
        size, width = rows.key.shape[-1], rows.value.shape[-1]
        if self.state == "diagonal":
            _, addend = self.run(rows, rows.zeros(size, width))
            return StateMap(total_decay(rows), addend), None
        # Columns of a state do not mix: those of an identity beside those of zeros.
        beside = jnp.zeros_like(rows.value, shape=(*rows.value.shape[:-1], size))
        wide = rows.replace(value=jnp.concatenate([beside, rows.value], -1))
        _, end = self.run(wide, identity_beside_zeros(rows))
        return StateMap(end[..., :size], end[..., size:]), None

    def mirror(self, rows: StateRows, kept: Any, grad_out: Any) -> Any:
        """Return the gradient of the state before each piece, through its outputs.

        Args:
          rows: the pieces.
          kept: what :meth:`summary` kept.
          grad_out: (P, L, N, V), in the dtype of the values.

        Returns:
          (P, N, K, V), in the dtype of sums. The gradient through the state behind the
          piece is added by its map.
        """
        zeros = rows.zeros(rows.key.shape[-1], rows.value.shape[-1])
        (out, _), vjp = jax.vjp(lambda state: self.run(rows, state, kept), zeros)
        return vjp((grad_out.astype(out.dtype), zeros))[0]

    def backward(
        self, rows: StateRows, kept: Any, state: Any, grad_out: Any, grad_state: Any
    ) -> StateRows:
        """Return the gradients of the arrays of the pieces.

        Args:
          rows: the pieces.
          kept: what :meth:`summary` kept.
          state: before each piece, as in :meth:`run`.
          grad_out: (P, L, N, V), in the dtype of the values.
          grad_state: (P, N, K, V), of the state behind each piece, in the dtype of
            sums.

        Returns:
          Rows of gradients in the shapes and dtypes of the arrays; ``begins`` is not
          looked at.
        """

        def run(*arrays):
            return self.run(with_arrays(rows, arrays), state)

        (out, _), vjp = jax.vjp(run, *arrays_of(rows))
        return with_arrays(rows, vjp((grad_out.astype(out.dtype), grad_state)))


def arrays_of(rows: StateRows) -> tuple:
    """Return the arrays that have a gradient."""
    return rows.query, rows.key, rows.value, rows.gate, rows.beta


def with_arrays(rows: StateRows, arrays) -> StateRows:
    """Return rows with other arrays: those that have a gradient."""
    query, key, value, gate, beta = arrays
    return rows.replace(query=query, key=key, value=value, gate=gate, beta=beta)


def total_decay(rows: StateRows):
    """Return what is left of a state behind each piece: (P, N, 1) or (P, N, K)."""
    decay = jnp.exp(rows.gate.sum(1))
    decay = decay if rows.gate.ndim == 4 else decay[..., None]
    return jnp.where(rows.begins.any(1)[:, None, None], 0, decay)


def identity_beside_zeros(rows: StateRows):
    """Return (P, N, K, K + V): the state from which a run ends in A and B."""
    size, width = rows.key.shape[-1], rows.value.shape[-1]
    return rows.zeros(size, size + width) + jnp.eye(
        size, size + width, dtype=rows.sum_dtype
    )
