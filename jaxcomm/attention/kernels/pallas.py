"""Attention of the local queries against one block, by kernels of our own on CUDA.

The functions of ``xla.py`` for what cuDNN has no masks for. A tile's scores stay in a
multiprocessor; mask, terms and dropout are those of ``scores.py``.

Source: Dao, FlashAttention-2, 2023.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm import compat
from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands
from jaxcomm.attention.kernels.pallas_work import LOG2_E, Sizes, Visits, Work
from jaxcomm.attention.mask import SKIP
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
        rows = _read(queries)
        query = query[...]
        slope, seed = _read((slope, seed))

        def visit(is_masked):
            def step(turn, carry):
                top, total, summed = carry
                at = pl.ds(visits.order[turn] * sizes.keys, sizes.keys)
                tile = work.tile(
                    *(rows, _read(keys, at), slope, seed, _read(bias, (..., at))),
                    is_masked=is_masked,
                    across=False,
                )
                scores, _ = work.scores(tile, _dot(query, key[at, :].T))
                new_top = jnp.maximum(top, scores.max(1))
                finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                weights = jnp.exp2(scores - finite[:, None])
                decay = jnp.exp2(top - finite)
                total = total * decay + weights.sum(1)
                thinned = tile.thin(weights).astype(value.dtype)
                summed = summed * decay[:, None] + _dot(thinned, value[at, :])
                return new_top, total, summed

            return step

        def attend(top, total, summed):
            top, total, summed = _walk(visits, visit, (top, total, summed))
            total = at_least_half(total)
            out[...] = summed / total[:, None]
            lse[...] = (top + jnp.log2(total)) * _LN_2

        if merged is None:
            nothing = jnp.zeros((sizes.queries,), jnp.float32)
            attend(nothing - jnp.inf, nothing, jnp.zeros(out.shape, jnp.float32))
            return

        @pl.when(visits.counts[1] > 0)
        def _():
            summed, top = _read(merged)
            # Of rows that saw no key the sum is 0, as their output.
            total = jnp.where(top == -jnp.inf, 0.0, 1.0)
            attend(top * LOG2_E, total, summed)

    rows, whole = _row_specs(work), functools.partial(_columns_spec, work)
    of_rows = pl.BlockSpec((None, None, sizes.queries), lambda i, h, b: (b, h, i))
    if merged is not None:
        merged = work.pad_rows(merged[0]), work.pad_of_rows(merged[1])
    given = _given(work, visits)
    first = len(jax.tree.leaves(given))
    out, lse = _call(
        kernel,
        name="jaxcomm_attention_forward",
        grid=(work.tiles[0], work.heads, work.batch),
        in_specs=(
            *_common_specs(work, visits),
            *(rows(work.query), whole(work.key), whole(work.value)),
            None if merged is None else (rows(merged[0]), of_rows),
        ),
        out_specs=(rows(work.value), of_rows),
        out_shape=(
            _float32(work.batch, work.query.shape[1], work.heads, columns),
            _float32(work.batch, work.heads, work.query.shape[1]),
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
    query, slopes = _grad_queries(operands, saved, total, config, of_queries, interpret)
    key, value = _grad_keys(operands, saved, config, of_keys, interpret)
    bias = None
    if operands.terms.bias is not None:
        bias = grad_bias(operands, saved, config, of_keys, interpret)
    return Grads(query, key, value, bias, slopes)


def _grad_queries(operands: Operands, saved, total, config, sizes: Sizes, interpret):
    work = Work(operands, config, sizes)
    visits, _ = work.visits()
    has_slopes = work.slopes is not None

    def kernel(visits, queries, keys, *refs):
        slope, seed, bias, query, key, value, *others = refs
        grad_out, lse, delta, total, grad_query, *grad_slope = others
        rows = _read(queries)
        query, grad_out, lse, delta = (x[...] for x in (query, grad_out, lse, delta))
        slope, seed = _read((slope, seed))

        def visit(is_masked):
            def step(turn, carry):
                summed, of_slope = carry
                at = pl.ds(visits.order[turn] * sizes.keys, sizes.keys)
                columns = key[at, :]
                tile = work.tile(
                    *(rows, _read(keys, at), slope, seed, _read(bias, (..., at))),
                    is_masked=is_masked,
                    across=False,
                )
                scores, derivative = work.scores(tile, _dot(query, columns.T))
                weights = jnp.exp2(scores - lse[:, None])
                grads = tile.thin(_dot(grad_out, value[at, :].T))
                grads = weights * (grads - delta[:, None])
                if derivative is not None:
                    grads *= derivative
                if has_slopes:
                    of_slope -= (grads * tile.distances(grads.dtype)).sum(1)
                return summed + _dot(grads.astype(key.dtype), columns), of_slope

            return step

        def sum_up():
            zeros = jnp.zeros(query.shape, jnp.float32), jnp.zeros_like(lse)
            summed, of_slope = _walk(visits, visit, zeros)
            summed *= config.scale
            grad_query[...] = summed if total is None else total[...] + summed
            if has_slopes:
                grad_slope[0][...] = of_slope

        if total is None or has_slopes:
            sum_up()
        else:
            pl.when(visits.counts[1] > 0)(sum_up)

    rows, whole = _row_specs(work), functools.partial(_columns_spec, work)
    of_rows = pl.BlockSpec((None, None, sizes.queries), lambda i, h, b: (b, h, i))
    per_row = _float32(work.batch, work.heads, work.query.shape[1])
    grad_out, lse, delta = saved
    grads = work.pad_rows(grad_out.astype(operands.query.dtype))
    if total is not None:
        total = work.pad_rows(total)
    of_saved = grads, work.pad_of_rows(lse), work.pad_of_rows(delta)
    given = *_given(work, visits), *of_saved
    aliases = {} if total is None else {len(jax.tree.leaves(given)): 0}
    found = _call(
        kernel,
        name="jaxcomm_attention_grad_queries",
        grid=(work.tiles[0], work.heads, work.batch),
        in_specs=(
            *_common_specs(work, visits),
            *(rows(work.query), whole(work.key), whole(work.value)),
            *(rows(grads), of_rows, of_rows),
            None if total is None else rows(total),
        ),
        out_specs=(rows(work.query), *[of_rows] * has_slopes),
        out_shape=(_float32(*work.query.shape), *[per_row] * has_slopes),
        input_output_aliases=aliases,
        sizes=sizes,
        interpret=interpret,
    )(*given, total)
    slopes = found[1].sum(2) if has_slopes else None
    return work.crop_rows(found[0], work.head_size), slopes


def _grad_keys(operands: Operands, saved, config, sizes: Sizes, interpret):
    work = Work(operands, config, sizes)
    _, visits = work.visits()

    def kernel(visits, queries, keys, *refs):
        slopes, seeds, bias, query, key, value, *others = refs
        grad_out, lse, delta, grad_key, grad_value = others
        columns, values, tokens = key[...], value[...], _read(keys)

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
                        *(_read(queries, at), tokens, slope, seed, added),
                        is_masked=is_masked,
                        across=True,
                    )
                    rows, grads = query[at, head, :], grad_out[at, head, :]
                    scores, derivative = work.scores(tile, _dot(columns, rows.T))
                    weights = jnp.exp2(scores - lse[head, at][None])
                    thinned = tile.thin(weights).astype(grads.dtype)
                    grad_values += _dot(thinned, grads)
                    of_scores = tile.thin(_dot(values, grads.T))
                    of_scores = weights * (of_scores - delta[head, at][None])
                    if derivative is not None:
                        of_scores *= derivative
                    grad_columns += _dot(of_scores.astype(rows.dtype), rows)
                    return grad_columns, grad_values

                return step

            return _walk(visits, visit, carry)

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (columns, values))
        grads = jax.lax.fori_loop(0, work.group, of_head, tuple(zeros))
        grad_key[...] = grads[0] * config.scale
        grad_value[...] = grads[1]

    grad_out, lse, delta = saved
    grads = work.pad_rows(grad_out.astype(operands.query.dtype))
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
    found = _call(
        kernel,
        name="jaxcomm_attention_grad_keys",
        grid=(work.tiles[1], key.shape[2], work.batch),
        in_specs=(
            _visit_specs(work, visits),
            work.token_specs(work.queries, None, lambda j, k, b: (b, 0)),
            work.token_specs(work.keys, sizes.keys, lambda j, k, b: (b, j)),
            *(per_head(work.slopes), per_head(work.seeds)),
            work.bias_spec(group, None, sizes.keys, lambda j, k, b: (b, k, 0, j)),
            *(of_group(work.query), of_tile(key), of_tile(value)),
            *(of_group(grads), of_rows, of_rows),
        ),
        out_specs=(of_tile(key), of_tile(value)),
        out_shape=(_float32(*key.shape), _float32(*value.shape)),
        sizes=sizes,
        interpret=interpret,
    )(
        *_given(work, visits),
        *(grads, work.pad_of_rows(lse), work.pad_of_rows(delta)),
    )
    keys = operands.key.shape[1]
    grad_key, grad_value = (x[:, :keys] for x in found)
    return grad_key[..., : work.head_size], grad_value[..., : work.value_size]


def _walk(visits: Visits, visit, carry):
    """Visit the tiles that are whole, then those that need the mask."""
    whole, visible = visits.counts[0], visits.counts[1]
    carry = jax.lax.fori_loop(0, whole, visit(False), carry)
    return jax.lax.fori_loop(whole, visible, visit(True), carry)


def _dot(a, b):
    # Else a GPU rounds float32 to 11 bits.
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _divmod(number, by: int):
    """Divide a number that is not negative; Triton has no ``%`` of both signs."""
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def _read(refs, at: Any = ...):
    """Read the refs of a pytree."""
    return jax.tree.map(lambda ref: ref[at], refs)


def grad_bias(operands: Operands, saved, config, sizes: Sizes, interpret: bool):
    """Compute the gradient of a bias, in its shape.

    A program owns a tile of it and walks over all that it was broadcast to. What needs
    no gradient costs nothing: XLA drops a kernel whose result is not used.

    Args:
      operands, config, sizes, interpret: as in :func:`hop_backward`.
      saved: gradient of the output; log-sum-exp in units of log 2; delta.
    """
    work = Work(operands, config, sizes)
    shape = operands.terms.bias.shape
    rows = work.tiles[0]
    # How many batches, heads and tiles of rows each tile serves.
    pairs = zip((work.batch, work.heads, rows), shape[:3], strict=True)
    shared = [count if held == 1 else 1 for count, held in pairs]
    modes = work.modes()

    def kernel(modes, queries, keys, *refs):
        slopes, seeds, bias, query, key, value, grad_out, lse, delta, grad = refs
        tile_of_rows, tile_of_keys, place = map(pl.program_id, range(3))
        batch, head = _divmod(place, shape[1])
        at_keys = pl.ds(tile_of_keys * sizes.keys, sizes.keys)

        def add(turn, total):
            b, rest = _divmod(turn, shared[1] * shared[2])
            h, i = _divmod(rest, shared[2])
            b, h, i = batch + b, head + h, tile_of_rows + i
            at = pl.ds(i * sizes.queries, sizes.queries)
            of_tokens = b if modes.shape[0] > 1 else 0

            def compute():
                tokens = (
                    _read(queries, (of_tokens, at)),
                    _read(keys, (of_tokens, at_keys)),
                )
                tile = work.tile(
                    *(*tokens, _read(slopes, (b, h)), _read(seeds, (b, h)), bias[...]),
                    is_masked=True,
                    across=False,
                )
                columns = key[b, at_keys, h // work.group, :]
                values = value[b, at_keys, h // work.group, :]
                products = _dot(query[b, at, h, :], columns.T)
                scores, derivative = work.scores(tile, products)
                weights = jnp.exp2(scores - lse[b, h, at][:, None])
                grads = tile.thin(_dot(grad_out[b, at, h, :], values.T))
                grads = weights * (grads - delta[b, h, at][:, None])
                grads = grads if derivative is None else grads * derivative
                return total + grads

            is_seen = modes[of_tokens, i, tile_of_keys] != SKIP
            return jax.lax.cond(is_seen, compute, lambda: total)

        zeros = jnp.zeros((sizes.queries, sizes.keys), jnp.float32)
        total = jax.lax.fori_loop(0, math.prod(shared), add, zeros)
        grad[...] = total if shape[2] > 1 else total.sum(0, keepdims=True)

    grad_out, lse, delta = saved
    grads = work.pad_rows(grad_out.astype(operands.query.dtype))
    block = (None, None, sizes.queries if shape[2] > 1 else 1, sizes.keys)
    tile = pl.BlockSpec(
        block, lambda i, j, n: (n // shape[1], jax.lax.rem(n, shape[1]), i, j)
    )
    _, *given = _given(work, None)
    given = modes, *given, grads, work.pad_of_rows(lse), work.pad_of_rows(delta)
    whole = jax.tree.map(lambda _: pl.BlockSpec(), given)
    found = _call(
        kernel,
        name="jaxcomm_attention_grad_bias",
        grid=(rows // shared[2], work.tiles[1], shape[0] * shape[1]),
        in_specs=tuple(
            tile if x is work.bias else y for x, y in zip(given, whole, strict=True)
        ),
        out_specs=tile,
        out_shape=_float32(*work.bias.shape),
        sizes=sizes,
        interpret=interpret,
    )(*given)
    return found[:, :, : shape[2], : shape[3]]


def _given(work: Work, visits: Visits | None):
    """Return the operands of all kernels."""
    return (
        *(visits, work.queries, work.keys, work.slopes, work.seeds, work.bias),
        *(work.query, work.key, work.value),
    )


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _visit_specs(work: Work, visits: Visits) -> Visits:
    batch = work.of_batch(visits.counts)

    def spec(x):
        return pl.BlockSpec((None, None, x.shape[2]), lambda i, h, b: (batch(b), i, 0))

    return Visits(*map(spec, visits))


def _common_specs(work: Work, visits: Visits):
    """Return the blocks of visits, tokens and terms of a program for queries."""

    def per_head(x):
        if x is None:
            return None
        return pl.BlockSpec((None, None), lambda i, h, b: (b, h))

    return (
        _visit_specs(work, visits),
        work.token_specs(work.queries, work.sizes.queries, lambda i, h, b: (b, i)),
        work.token_specs(work.keys, None, lambda i, h, b: (b, 0)),
        *(per_head(work.slopes), per_head(work.seeds)),
        work.bias_spec(None, work.sizes.queries, None, lambda i, h, b: (b, h, i, 0)),
    )


def _row_specs(work: Work):
    """Return a function that gives the block of a program's queries."""

    def spec(x):
        block = (None, work.sizes.queries, None, x.shape[3])
        return pl.BlockSpec(block, lambda i, h, b: (b, i, h, 0))

    return spec


def _columns_spec(work: Work, x):
    """Return the block of all keys, or values, that a program's queries may see."""
    group = work.group
    block = (None, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(block, lambda i, h, b: (b, 0, h // group, 0))


def _call(kernel, *, sizes: Sizes, interpret: bool, **options):
    return pl.pallas_call(
        kernel,
        compiler_params=compat.triton_parameters(
            warps=sizes.warps, stages=sizes.stages
        ),
        interpret=interpret,
        **options,
    )
