"""Recurrent layers: what a chunk of tokens is to each.

Delta rules erase what the state holds for a token's key, and write its value. With the
decay a and the key k of a token, of length 1: ``S = (I - beta k k^T) diag(a) S + beta k
v^T``.

Source: Yang et al., Gated Delta Networks, 2025, and Parallelizing Linear Transformers
with the Delta Rule, 2024; Kimi Team, Kimi Linear, 2025.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.state.chunked import Chunk, ChunkedKernel, product, sums
from jaxcomm.attention.state.decay import Decays, scores

# Products of matrices of so few rows are sums of a fused loop.
_SMALL = 8


@dataclasses.dataclass(frozen=True)
class Mamba2(ChunkedKernel):
    """Mamba 2 (SSD): ``S = exp(gate) S + key value^T``, with a gate for each head.

    In the words of Mamba 2: query is C, key is B, value is ``x * dt``, and gate is ``A
    * dt``. Pass ``scale=1.0``.

    Source: Dao and Gu, Transformers are SSMs, 2024.

    Attributes:
      chunk: tokens of a step, a power of two.
    """

    name = "mamba2"
    state = "diagonal"
    chunk: int = 64

    def _chunk_of(self, rows, kept):
        decays = Decays.of(rows.gate, rows.begins)
        query, key, value = sums(rows)
        (seen,) = scores([query], key, decays, rows.key.dtype)
        start, end = decays.from_start[..., None], decays.to_end[..., None]
        return Chunk(
            query=rows.scale * start * query,
            scores=rows.scale * seen,
            erased=None,
            written=value,
            key=end * key,
            decay=decays.through,
        ), None


@dataclasses.dataclass(frozen=True)
class GatedDelta(ChunkedKernel):
    """The gated delta rule (GDN), with a gate and a ``beta`` for each head and token.

    Attributes:
      chunk: tokens of a step, a power of two.
    """

    name = "gated_delta"
    state = "matrix"
    gates = "head"
    has_beta = True
    chunk: int = 64

    def _chunk_of(self, rows, kept):
        dtype, scale = rows.key.dtype, rows.scale
        decays = Decays.of(rows.gate, rows.begins)
        query, key, value = sums(rows)
        seen, among = scores([query, key], key, decays, dtype)
        beta = rows.beta[..., None]
        lower = jnp.tril(beta * among, -1)
        inverse = kept
        if inverse is None:
            inverse = jax.lax.stop_gradient(_unit_inverse(lower))
        solve = _inverse(dtype, lower, inverse.astype(lower.dtype))
        start, end = decays.from_start, decays.to_end
        if rows.gate.ndim == 3:
            start, end = start[..., None], end[..., None]
        return Chunk(
            query=scale * start * query,
            scores=scale * seen,
            erased=product("pnij,pnjk->pnik", solve, beta * start * key, dtype),
            written=product("pnij,pnjv->pniv", solve, beta * value, dtype),
            key=end * key,
            decay=decays.through,
        ), inverse.astype(dtype)


@dataclasses.dataclass(frozen=True)
class KimiDelta(GatedDelta):
    """Kimi delta attention (KDA): as :class:`GatedDelta`, with a gate for each channel.

    Attributes:
      chunk: tokens of a step, a power of two.
    """

    name = "kimi_delta"
    gates = "key"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _inverse(dtype, lower, inverse):
    """Return the inverse of I + lower, which is given, with the derivative of one."""
    return inverse


@_inverse.defjvp
def _inverse_jvp(dtype, primals, tangents):
    lower, inverse = primals
    out = _inverse(dtype, lower, inverse)
    change = product("pnij,pnjk->pnik", out, tangents[0], dtype)
    return out, -product("pnij,pnjk->pnik", change, out, dtype)


def _unit_inverse(lower):
    """Return the inverse of I + lower, (..., C, C), strictly lower triangular.

    By halves, whose inverses come from one call: the corner of the inverse is ``-D^-1 C
    A^-1``. A power series would need fewer steps, and cancels where keys are alike.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    first, second = lower[..., :half, :half], lower[..., half:, half:]
    both = _unit_inverse(jnp.stack([first, second]))
    corner = -_times(both[1], _times(lower[..., half:, :half], both[0]))
    top = jnp.concatenate([both[0], jnp.zeros_like(corner)], -1)
    return jnp.concatenate([top, jnp.concatenate([corner, both[1]], -1)], -2)


def _times(a, b):
    if a.shape[-1] > _SMALL:
        return jnp.matmul(a, b, precision="highest")
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)
