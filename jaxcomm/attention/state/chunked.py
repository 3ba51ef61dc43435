"""Kernels in plain JAX that take a chunk of tokens at a time, by matrix products."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import sum_dtype
from jaxcomm.attention.state.kernel import (
    StateKernel,
    StateRows,
    arrays_of,
    identity_beside_zeros,
    total_decay,
    with_arrays,
)
from jaxcomm.attention.state.maps import StateMap


class Chunk(NamedTuple):
    """A chunk of C tokens as a step of the state, apart from the state itself.

    From the state S before it: ``new = written - erased S``, the values that it adds;
    ``out = query S + scores new``; and the state becomes ``decay S + key^T new``.

    Attributes:
      query: (P, N, C, K), decayed from the start of the chunk, and scaled.
      scores: (P, N, C, C), lower triangular.
      erased: (P, N, C, K), or None if nothing is erased.
      written: (P, N, C, V).
      key: (P, N, C, K), decayed to the end of the chunk.
      decay: (P, N, 1) or (P, N, K), of the whole chunk.
    """

    query: Any
    scores: Any
    erased: Any
    written: Any
    key: Any
    decay: Any


class ChunkedKernel(StateKernel):
    """A kernel that says what a chunk of tokens is; steps and gradients follow.

    Products take the dtype of the queries and sum in the dtype of sums, in which the
    state stays. All pieces take their steps together: a rank's tokens are cut into
    about as many pieces as a piece has chunks.
    """

    def __post_init__(self):
        if self.chunk < 1 or self.chunk & (self.chunk - 1):
            raise ValueError(
                f"{type(self).__name__}: chunk={self.chunk}. Pass a power of two."
            )

    @abc.abstractmethod
    def _chunk_of(self, rows: StateRows, kept: Any) -> tuple[Chunk, Any]:
        """Return a chunk, and what to keep of it.

        Args:
          rows: the tokens of a chunk of each piece, heads before tokens: (P, N, C, K),
            (P, N, C) and so on; ``begins`` is (P, C).
          kept: what was kept of it before, or None.
        """

    def summary(self, rows):
        size = rows.key.shape[-1]
        is_matrix = self.state == "matrix"
        width = rows.value.shape[-1]
        start = identity_beside_zeros(rows) if is_matrix else rows.zeros(size, width)

        def step(state, of):
            chunk, kept = self._chunk_of(of, None)
            if is_matrix:
                written = jnp.pad(chunk.written, [(0, 0)] * 3 + [(size, 0)])
                chunk = chunk._replace(written=written)
            return _advanced(chunk, state, of.key.dtype)[0], kept

        end, kept = jax.lax.scan(step, start, self._chunks(rows))
        if is_matrix:
            return StateMap(end[..., :size], end[..., size:]), kept
        return StateMap(total_decay(rows), end), kept

    def run(self, rows, state, kept=None):
        def step(state, of):
            chunk, _ = self._chunk_of(*of)
            state, out = _stepped(chunk, state, of[0].key.dtype)
            return state, out.astype(rows.value.dtype)

        state, out = jax.lax.scan(step, state, (self._chunks(rows), kept))
        return _whole(out), state

    def mirror(self, rows, kept, grad_out):
        dtype = rows.key.dtype

        def step(grad, of):
            rows, kept, grad_out = of
            chunk, _ = self._chunk_of(rows, kept)
            before = _product("nck,ncv->nkv", chunk.query, grad_out, dtype)
            if chunk.erased is not None:
                new = _product("ncs,ncv->nsv", chunk.scores, grad_out, dtype)
                new += _product("nck,nkv->ncv", chunk.key, grad, dtype)
                before -= _product("nck,ncv->nkv", chunk.erased, new, dtype)
            return chunk.decay[..., None] * grad + before, None

        of = self._chunks(rows), kept, self._chunks(grad_out)
        start = rows.zeros(rows.key.shape[-1], rows.value.shape[-1])
        return jax.lax.scan(step, start, of, reverse=True)[0]

    def backward(self, rows, kept, state, grad_out, grad_state):
        dtype = rows.key.dtype
        chunks = self._chunks(rows)

        def forward(state, of):
            chunk, _ = self._chunk_of(*of)
            return _advanced(chunk, state, dtype)[0], state.astype(dtype)

        _, states = jax.lax.scan(forward, state, (chunks, kept))

        def step(grad, of):
            rows, kept, state, grad_out = of

            def run(arrays, state):
                chunk, _ = self._chunk_of(with_arrays(rows, arrays), kept)
                return _stepped(chunk, state, dtype)

            state = state.astype(grad.dtype)
            (_, out), vjp = jax.vjp(run, arrays_of(rows), state)
            grads, grad = vjp((grad, grad_out.astype(out.dtype)))
            return grad, grads

        of = chunks, kept, states, self._chunks(grad_out)
        _, grads = jax.lax.scan(step, grad_state, of, reverse=True)
        return with_arrays(rows, jax.tree.map(_whole, grads))

    def _chunks(self, tree):
        """Return arrays (P, L, N, ...) as (chunks, P, N, C, ...); begins without N."""

        def one(x):
            pieces, tokens = x.shape[:2]
            x = x.reshape(pieces, tokens // self.chunk, self.chunk, *x.shape[2:])
            x = jnp.moveaxis(x, 1, 0)
            return x if x.ndim == 3 else jnp.swapaxes(x, 2, 3)

        return jax.tree.map(one, tree)


def _whole(x):
    """Return (chunks, P, N, C, ...) as (P, L, N, ...)."""
    x = jnp.moveaxis(jnp.swapaxes(x, 2, 3), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _advanced(chunk: Chunk, state, dtype):
    """Return the state behind a chunk, and the values that it adds."""
    new = chunk.written
    if chunk.erased is not None:
        new = new - _product("nck,nkv->ncv", chunk.erased, state, dtype)
    added = _product("nck,ncv->nkv", chunk.key, new, dtype)
    return chunk.decay[..., None] * state + added, new


def _stepped(chunk: Chunk, state, dtype):
    """Return the state behind a chunk, and its outputs."""
    after, new = _advanced(chunk, state, dtype)
    out = _product("nck,nkv->ncv", chunk.query, state, dtype)
    return after, out + _product("nsc,ncv->nsv", chunk.scores, new, dtype)


def _product(spec: str, a, b, dtype):
    """Return products of heads (P, N, ...), of factors in a dtype."""
    left, right = spec.split(",")
    right, out = right.split("->")
    return product(f"p{left},p{right}->p{out}", a, b, dtype)


def sums(rows: StateRows):
    """Return query, key and value in the dtype of sums."""
    return (x.astype(rows.sum_dtype) for x in (rows.query, rows.key, rows.value))


def product(spec: str, a, b, dtype):
    """Return an einsum of factors in a dtype, summed in the dtype of sums."""
    of_sums = sum_dtype(dtype)
    precision = "highest" if dtype == of_sums else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=of_sums)
