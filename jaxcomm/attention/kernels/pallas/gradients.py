"""The kernels of the gradients of queries, keys, values and bias."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.kernel import Hop, Saved
from jaxcomm.attention.kernels.pallas.work import (
    Sizes,
    Work,
    call_kernel,
    common_specs,
    divide,
    float32_of,
    operands_of,
    product,
    read,
    row_specs,
    visit_specs,
    walk,
)
from jaxcomm.attention.mask import SKIP


def grad_queries(hop: Hop, saved: Saved, total, sizes: Sizes, interpret: bool):
    """Compute the gradients of the queries and of the slopes, or None for those.

    Args:
      hop, total: as in ``Kernel.backward_onto``; ``total`` may be None.
      saved: as there, but the log-sum-exp is in units of log 2.
      sizes: of the tiles.
      interpret: whether to run the kernel on a CPU, slowly.
    """
    work = Work(hop, sizes)
    visits, _ = work.visits()
    has_slopes = work.slopes is not None

    def kernel(visits, queries, keys, *refs):
        slope, seed, bias, query, key, value, *others = refs
        grad_out, lse, delta, total, grad_query, *grad_slope = others
        rows = read(queries)
        query, grad_out, lse, delta = (x[...] for x in (query, grad_out, lse, delta))
        slope, seed = read((slope, seed))

        def visit(is_masked):
            def step(turn, carry):
                summed, of_slope = carry
                at = pl.ds(visits.order[turn] * sizes.keys, sizes.keys)
                columns = key[at, :]
                tile = work.tile(
                    *(rows, read(keys, at), slope, seed, read(bias, (..., at))),
                    is_masked=is_masked,
                    across=False,
                )
                scores, derivative = work.scores(tile, product(query, columns.T))
                weights = jnp.exp2(scores - lse[:, None])
                grads = tile.thin(product(grad_out, value[at, :].T))
                grads = weights * (grads - delta[:, None])
                if derivative is not None:
                    grads *= derivative
                if has_slopes:
                    of_slope -= (grads * tile.distances(grads.dtype)).sum(1)
                return summed + product(grads.astype(key.dtype), columns), of_slope

            return step

        def sum_up():
            zeros = jnp.zeros(query.shape, jnp.float32), jnp.zeros_like(lse)
            summed, of_slope = walk(visits, visit, zeros)
            summed *= hop.scores.scale
            grad_query[...] = summed if total is None else total[...] + summed
            if has_slopes:
                grad_slope[0][...] = of_slope

        if total is None or has_slopes:
            sum_up()
        else:
            pl.when(visits.counts[1] > 0)(sum_up)

    rows, whole, of_rows = row_specs(work)
    per_row = float32_of(work.batch, work.heads, work.query.shape[1])
    grads = work.pad_rows(saved.grad_out.astype(hop.query.dtype))
    if total is not None:
        total = work.pad_rows(total)
    of_saved = grads, work.pad_of_rows(saved.lse), work.pad_of_rows(saved.delta)
    given = *operands_of(work, visits), *of_saved
    aliases = {} if total is None else {len(jax.tree.leaves(given)): 0}
    found = call_kernel(
        kernel,
        name="jaxcomm_attention_grad_queries",
        grid=(work.tiles[0], work.heads, work.batch),
        in_specs=(
            *common_specs(work, visits),
            *(rows(work.query), whole(work.key), whole(work.value)),
            *(rows(grads), of_rows, of_rows),
            None if total is None else rows(total),
        ),
        out_specs=(rows(work.query), *[of_rows] * has_slopes),
        out_shape=(float32_of(*work.query.shape), *[per_row] * has_slopes),
        input_output_aliases=aliases,
        sizes=sizes,
        interpret=interpret,
    )(*given, total)
    slopes = found[1].sum(2) if has_slopes else None
    return work.crop_rows(found[0], work.head_size), slopes


def grad_keys(hop: Hop, saved: Saved, sizes: Sizes, interpret: bool):
    """Compute the gradients of keys and values; see :func:`grad_queries`."""
    work = Work(hop, sizes)
    _, visits = work.visits()

    def kernel(visits, queries, keys, *refs):
        slopes, seeds, bias, query, key, value, *others = refs
        grad_out, lse, delta, grad_key, grad_value = others
        columns, values, tokens = key[...], value[...], read(keys)

        def of_head(head, carry):
            slope, seed = (None if x is None else x[head] for x in (slopes, seeds))

            def visit(is_masked):
                def step(turn, carry):
                    grad_columns, grad_values = carry
                    at = pl.ds(visits.order[turn] * sizes.queries, sizes.queries)
                    added = None
                    if bias is not None:
                        added = work.bias_at(bias, head, at, slice(None)).T
                    tile = work.tile(
                        *(read(queries, at), tokens, slope, seed, added),
                        is_masked=is_masked,
                        across=True,
                    )
                    rows, grads = query[at, head, :], grad_out[at, head, :]
                    scores, derivative = work.scores(tile, product(columns, rows.T))
                    weights = jnp.exp2(scores - lse[head, at][None])
                    thinned = tile.thin(weights).astype(grads.dtype)
                    grad_values += product(thinned, grads)
                    of_scores = tile.thin(product(values, grads.T))
                    of_scores = weights * (of_scores - delta[head, at][None])
                    if derivative is not None:
                        of_scores *= derivative
                    grad_columns += product(of_scores.astype(rows.dtype), rows)
                    return grad_columns, grad_values

                return step

            return walk(visits, visit, carry)

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (columns, values))
        grads = jax.lax.fori_loop(0, work.group, of_head, tuple(zeros))
        grad_key[...] = grads[0] * hop.scores.scale
        grad_value[...] = grads[1]

    grads = work.pad_rows(saved.grad_out.astype(hop.query.dtype))
    group = work.group

    def of_tile(x):
        block = (None, sizes.keys, None, x.shape[3])
        return pl.BlockSpec(block, lambda j, k, b: (b, j, k, 0))

    def of_group(x):
        block = (None, x.shape[1], group, x.shape[3])
        return pl.BlockSpec(block, lambda j, k, b: (b, 0, k, 0))

    def per_head(x):
        if x is None:
            return None
        return pl.BlockSpec((None, group), lambda j, k, b: (b, k))

    length = work.query.shape[1]
    of_rows = pl.BlockSpec((None, group, length), lambda j, k, b: (b, k, 0))
    key, value = work.key, work.value
    found = call_kernel(
        kernel,
        name="jaxcomm_attention_grad_keys",
        grid=(work.tiles[1], key.shape[2], work.batch),
        in_specs=(
            visit_specs(work, visits),
            work.token_specs(work.queries, None, lambda j, k, b: (b, 0)),
            work.token_specs(work.keys, sizes.keys, lambda j, k, b: (b, j)),
            *(per_head(work.slopes), per_head(work.seeds)),
            work.bias_spec(group, None, sizes.keys, lambda j, k, b: (b, k, 0, j)),
            *(of_group(work.query), of_tile(key), of_tile(value)),
            *(of_group(grads), of_rows, of_rows),
        ),
        out_specs=(of_tile(key), of_tile(value)),
        out_shape=(float32_of(*key.shape), float32_of(*value.shape)),
        sizes=sizes,
        interpret=interpret,
    )(
        *operands_of(work, visits),
        *(grads, work.pad_of_rows(saved.lse), work.pad_of_rows(saved.delta)),
    )
    keys = hop.key.shape[1]
    grad_key, grad_value = (x[:, :keys] for x in found)
    return grad_key[..., : work.head_size], grad_value[..., : work.value_size]


def grad_bias(hop: Hop, saved: Saved, sizes: Sizes, interpret: bool):
    """Compute the gradient of a bias, in its shape.

    A program owns a tile of it and walks over all that it was broadcast to. What needs
    no gradient costs nothing: XLA drops a kernel whose result is not used.
    """
    work = Work(hop, sizes)
    shape = hop.scores.bias.shape
    rows = work.tiles[0]
    # How many batches, heads and tiles of rows each tile serves.
    pairs = zip((work.batch, work.heads, rows), shape[:3], strict=True)
    shared = [count if held == 1 else 1 for count, held in pairs]
    modes = work.modes()

    def kernel(modes, queries, keys, *refs):
        slopes, seeds, bias, query, key, value, grad_out, lse, delta, grad = refs
        tile_of_rows, tile_of_keys, place = map(pl.program_id, range(3))
        batch, head = divide(place, shape[1])
        at_keys = pl.ds(tile_of_keys * sizes.keys, sizes.keys)

        def add(turn, total):
            b, rest = divide(turn, shared[1] * shared[2])
            h, i = divide(rest, shared[2])
            b, h, i = batch + b, head + h, tile_of_rows + i
            at = pl.ds(i * sizes.queries, sizes.queries)
            of_tokens = b if modes.shape[0] > 1 else 0

            def compute():
                tokens = (
                    read(queries, (of_tokens, at)),
                    read(keys, (of_tokens, at_keys)),
                )
                tile = work.tile(
                    *(*tokens, read(slopes, (b, h)), read(seeds, (b, h)), bias[...]),
                    is_masked=True,
                    across=False,
                )
                columns = key[b, at_keys, h // work.group, :]
                values = value[b, at_keys, h // work.group, :]
                products = product(query[b, at, h, :], columns.T)
                scores, derivative = work.scores(tile, products)
                weights = jnp.exp2(scores - lse[b, h, at][:, None])
                grads = tile.thin(product(grad_out[b, at, h, :], values.T))
                grads = weights * (grads - delta[b, h, at][:, None])
                grads = grads if derivative is None else grads * derivative
                return total + grads

            is_seen = modes[of_tokens, i, tile_of_keys] != SKIP
            return jax.lax.cond(is_seen, compute, lambda: total)

        zeros = jnp.zeros((sizes.queries, sizes.keys), jnp.float32)
        total = jax.lax.fori_loop(0, math.prod(shared), add, zeros)
        grad[...] = total if shape[2] > 1 else total.sum(0, keepdims=True)

    grads = work.pad_rows(saved.grad_out.astype(hop.query.dtype))
    block = (None, None, sizes.queries if shape[2] > 1 else 1, sizes.keys)
    tile = pl.BlockSpec(
        block, lambda i, j, n: (n // shape[1], jax.lax.rem(n, shape[1]), i, j)
    )
    _, *given = operands_of(work, None)
    rows_of_saved = work.pad_of_rows(saved.lse), work.pad_of_rows(saved.delta)
    given = modes, *given, grads, *rows_of_saved
    whole = jax.tree.map(lambda _: pl.BlockSpec(), given)
    found = call_kernel(
        kernel,
        name="jaxcomm_attention_grad_bias",
        grid=(rows // shared[2], work.tiles[1], shape[0] * shape[1]),
        in_specs=tuple(
            tile if x is work.bias else y for x, y in zip(given, whole, strict=True)
        ),
        out_specs=tile,
        out_shape=float32_of(*work.bias.shape),
        sizes=sizes,
        interpret=interpret,
    )(*given)
    return found[:, :, : shape[2], : shape[3]]
