"""Attention of the local queries against one block, by kernels of our own on CUDA.

The functions of ``xla.py`` for what cuDNN has no masks for. A tile's scores stay in a
multiprocessor; mask, terms and dropout are those of ``scores.py``.

Source: Dao, FlashAttention-2, 2023.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands
from jaxcomm.attention.kernels.pallas_bias import grad_bias
from jaxcomm.attention.kernels.pallas_gradients import grad_keys, grad_queries
from jaxcomm.attention.kernels.pallas_program import (
    call_kernel,
    columns_spec,
    common_specs,
    float32_of,
    operands_of,
    product,
    read,
    row_specs,
    walk,
)
from jaxcomm.attention.kernels.pallas_work import LOG2_E, Sizes, Work
from jaxcomm.attention.merge import at_least_half

_LN_2 = 1 / LOG2_E


def forward_sizes(operands: Operands) -> Sizes:
    """Return the tiles of :func:`hop_forward`.

    In bfloat16 and up to a head size of 128, of eight on an H200 the fastest.
    """
    head_size = max(operands.query.shape[3], operands.value.shape[3])
    if operands.query.dtype.itemsize > 2:
        return Sizes(queries=64, keys=32, warps=4, stages=1)
    if head_size > 128:
        return Sizes(queries=128, keys=32, warps=8, stages=2)
    return Sizes(queries=128, keys=64, warps=4, stages=3 if head_size <= 64 else 2)


def backward_sizes(operands: Operands) -> tuple[Sizes, Sizes]:
    """Return the tiles of the gradients of queries, and of keys and values.

    In bfloat16 and up to a head size of 128, of eight each on an H200 the fastest.
    """
    head_size = max(operands.query.shape[3], operands.value.shape[3])
    if operands.query.dtype.itemsize > 2:
        return Sizes(32, 32, 4, 1), Sizes(32, 32, 4, 1)
    if head_size > 128:
        return Sizes(64, 32, 4, 1), Sizes(32, 64, 4, 1)
    of_keys = Sizes(queries=64, keys=64, warps=4, stages=2)
    return (of_keys if head_size > 64 else Sizes(128, 64, 8, 2)), of_keys


def hop_forward(
    operands: Operands,
    merged=None,
    *,
    config: HopConfig,
    sizes: Sizes | None = None,
    interpret: bool = False,
):
    """Compute what :func:`jaxcomm.attention.kernels.xla.hop_forward` does.

    Args:
      operands: in bfloat16, float16 or float32.
      merged: as in :func:`jaxcomm.attention.kernels.primitive.hop_forward`.
      config: what is known before.
      sizes: of the tiles.
      interpret: whether to run the kernel on a CPU, slowly.
    """
    sizes = sizes or forward_sizes(operands)
    work = Work(operands, config, sizes)
    visits, _ = work.visits()
    columns = work.value.shape[3]

    def kernel(visits, queries, keys, *refs):
        slope, seed, bias, query, key, value, merged, out, lse = refs
        rows = read(queries)
        query = query[...]
        slope, seed = read((slope, seed))

        def visit(is_masked):
            def step(turn, carry):
                top, total, summed = carry
                at = pl.ds(visits.order[turn] * sizes.keys, sizes.keys)
                tile = work.tile(
                    *(rows, read(keys, at), slope, seed, read(bias, (..., at))),
                    is_masked=is_masked,
                    across=False,
                )
                scores, _ = work.scores(tile, product(query, key[at, :].T))
                new_top = jnp.maximum(top, scores.max(1))
                finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                weights = jnp.exp2(scores - finite[:, None])
                decay = jnp.exp2(top - finite)
                total = total * decay + weights.sum(1)
                thinned = tile.thin(weights).astype(value.dtype)
                summed = summed * decay[:, None] + product(thinned, value[at, :])
                return new_top, total, summed

            return step

        def attend(top, total, summed):
            top, total, summed = walk(visits, visit, (top, total, summed))
            total = at_least_half(total)
            out[...] = summed / total[:, None]
            lse[...] = (top + jnp.log2(total)) * _LN_2

        if merged is None:
            nothing = jnp.zeros((sizes.queries,), jnp.float32)
            attend(nothing - jnp.inf, nothing, jnp.zeros(out.shape, jnp.float32))
            return

        @pl.when(visits.counts[1] > 0)
        def _():
            summed, top = read(merged)
            # Of rows that saw no key the sum is 0, as their output.
            total = jnp.where(top == -jnp.inf, 0.0, 1.0)
            attend(top * LOG2_E, total, summed)

    rows, whole = row_specs(work), functools.partial(columns_spec, work)
    of_rows = pl.BlockSpec((None, None, sizes.queries), lambda i, h, b: (b, h, i))
    if merged is not None:
        merged = work.pad_rows(merged[0]), work.pad_of_rows(merged[1])
    given = operands_of(work, visits)
    first = len(jax.tree.leaves(given))
    out, lse = call_kernel(
        kernel,
        name="jaxcomm_attention_forward",
        grid=(work.tiles[0], work.heads, work.batch),
        in_specs=(
            *common_specs(work, visits),
            *(rows(work.query), whole(work.key), whole(work.value)),
            None if merged is None else (rows(merged[0]), of_rows),
        ),
        out_specs=(rows(work.value), of_rows),
        out_shape=(
            float32_of(work.batch, work.query.shape[1], work.heads, columns),
            float32_of(work.batch, work.heads, work.query.shape[1]),
        ),
        # Then a tile that sees nothing need not be written.
        input_output_aliases={} if merged is None else {first: 0, first + 1: 1},
        sizes=sizes,
        interpret=interpret,
    )(*given, merged)
    lse = jnp.moveaxis(lse[:, :, : work.length], 1, 2)
    return work.crop_rows(out, work.value_size), lse


def hop_backward(
    operands: Operands,
    grad_out,
    lse,
    delta,
    out=None,
    total=None,
    *,
    config: HopConfig,
    sizes: tuple[Sizes, Sizes] | None = None,
    interpret: bool = False,
) -> Grads:
    """Compute what :func:`jaxcomm.attention.kernels.xla.hop_backward` does.

    Args:
      operands, config, interpret: as in :func:`hop_forward`.
      grad_out, lse, delta: as there.
      out: not used: ``delta`` has what is needed of it.
      total: as in :func:`jaxcomm.attention.kernels.primitive.hop_backward`.
      sizes: of the tiles, for the queries and for keys and values.
    """
    of_queries, of_keys = sizes or backward_sizes(operands)
    # exp(score - inf) is 0: rows that see no key give no gradient.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse) * LOG2_E
    saved = grad_out, lse, delta
    query, slopes = grad_queries(operands, saved, total, config, of_queries, interpret)
    key, value = grad_keys(operands, saved, config, of_keys, interpret)
    bias = None
    if operands.terms.bias is not None:
        bias = grad_bias(operands, saved, config, of_keys, interpret)
    return Grads(query, key, value, bias, slopes)
