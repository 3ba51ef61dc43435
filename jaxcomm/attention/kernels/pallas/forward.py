"""The kernel of the forward pass.

Source: Dao, FlashAttention-2, 2023.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.kernel import Hop, at_least_half
from jaxcomm.attention.kernels.pallas.work import (
    LOG2_E,
    Sizes,
    Work,
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

_LN_2 = 1 / LOG2_E


def attend(hop: Hop, merged, sizes: Sizes, interpret: bool):
    """Compute ``Kernel.forward``, or ``Kernel.forward_onto`` if ``merged`` is not None.

    Args:
      hop: in bfloat16, float16 or float32.
      merged: (out, lse) over other keys, or None.
      sizes: of the tiles.
      interpret: whether to run the kernel on a CPU, slowly.
    """
    work = Work(hop, sizes)
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
