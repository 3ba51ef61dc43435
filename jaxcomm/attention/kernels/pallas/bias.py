"""The kernel of the gradient of a bias."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.hop import Hop, Saved
from jaxcomm.attention.kernels.pallas.program import (
    call_kernel,
    divide,
    float32_of,
    operands_of,
    product,
    read,
)
from jaxcomm.attention.kernels.pallas.work import Sizes, Work
from jaxcomm.attention.mask import SKIP


def grad_bias(hop: Hop, saved: Saved, sizes: Sizes, interpret: bool):
    """Compute the gradient of a bias, in its shape.

    A program owns a tile of it and walks over all that it was broadcast to. What needs
    no gradient costs nothing: XLA drops a kernel whose result is not used.

    Args:
      hop, saved, sizes, interpret: as in ``gradients.grad_queries``.
    """
    work = Work(hop, sizes)
    shape = hop.bias.shape
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
