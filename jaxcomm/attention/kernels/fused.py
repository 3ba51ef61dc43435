"""Attention of the local queries against one block, computed by cuDNN.

The functions of ``xla.py`` for programs on CUDA. cuDNN has no masks from positions, so
a hop computes one of three rectangles, as the schedule says and the positions choose.

Source: Dao, FlashAttention-2, 2023, for what the kernel computes.
"""

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels import cudnn
from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands, sum_dtype
from jaxcomm.attention.kernels.tile_select import Choice, common_tiling
from jaxcomm.attention.schedules.block import Block

# Head sizes are multiples of it.
_COLUMNS = 8
# The units of the parts of a float32 number, whose range is beyond float16's.
_PARTS = (2.0**10, 1.0, 2.0**-10, 2.0**-20)


def backward_head_size(head_size: int, config: HopConfig) -> int:
    """Return the head size that cuDNN sees in :func:`hop_backward`."""
    return head_size + _COLUMNS if config.has_residual else head_size


def hop_forward(operands: Operands, *, config: HopConfig):
    """Compute what :func:`jaxcomm.attention.kernels.xla.hop_forward` does, with cuDNN.

    Query, key and value are bfloat16 or float16, and the output is rounded to that
    dtype before it is returned as float32; the log-sum-exp is not.
    """
    query, key, value = operands[:3]
    query_positions, key_positions = operands.queries.positions, operands.keys.positions
    # Else XLA would cut the tiles of all hops before the first, and keep them.
    key, key_positions = jax.lax.optimization_barrier((key, key_positions))

    def compute(block: Block):
        rows, columns = slice(*block.queries), slice(*block.keys)
        out, lse = cudnn.forward(
            query[:, rows],
            key[:, columns],
            value[:, columns],
            scale=config.scale,
            is_causal=block.is_causal,
            left=block.left,
        )
        return (
            _embed(out, block.queries, query.shape[1]),
            _embed(jnp.moveaxis(lse, 2, 1), block.queries, query.shape[1], -jnp.inf),
        )

    def compute_either(choice: Choice):
        def of_tile(*tile):
            out, lse = cudnn.forward(*tile, scale=config.scale, is_causal=False)
            return out.astype(lse.dtype), jnp.moveaxis(lse, 2, 1)

        tiles = choice.queries(query), choice.keys(key), choice.keys(value)
        attended = [of_tile(*tile) for tile in zip(*tiles, strict=True)]
        return choice.merge(attended, query.shape[1])

    def skip():
        out = jnp.zeros_like(query)
        return out, jnp.full(query.shape[:3], -jnp.inf, sum_dtype(query.dtype))

    positions = query_positions, key_positions
    out, lse = _choose(config, positions, compute, skip, compute_either)
    # Outside of the branches: what a branch returns is written to memory.
    return out.astype(lse.dtype), lse


def hop_backward(
    operands: Operands, grad_out, lse, delta, out, *, config: HopConfig
) -> Grads:
    """Compute what :func:`jaxcomm.attention.kernels.xla.hop_backward` does, with cuDNN.

    Args:
      operands, grad_out, lse, delta, config: as there, in bfloat16 or float16.
      out: (B, T, N, D), the output over all keys. cuDNN computes ``delta`` of it, which
        is right if ``lse`` has no gradient.
    """
    query, key, value = operands[:3]
    head_size = query.shape[3]
    if config.has_residual:
        query, key, value, out, grad_out = _with_delta(
            query, key, value, out, grad_out, delta
        )
    # exp(score - inf) is 0: rows that see no key give no gradient.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)

    def of_queries(block: Block):
        rows = slice(*block.queries)
        heads_first = jnp.moveaxis(lse[:, rows], 2, 1)
        return query[:, rows], heads_first, out[:, rows], grad_out[:, rows]

    assert config.blocks is not None
    blocks = (config.blocks.same, config.blocks.earlier, config.blocks.later)
    # Outside of the branches: the hops of a ring share them.
    cut = {block: of_queries(block) for block in blocks}

    def compute(block: Block):
        columns = slice(*block.keys)
        rows, *of_rows = cut[block]
        grads = cudnn.backward(
            rows,
            key[:, columns],
            value[:, columns],
            *of_rows,
            scale=config.scale,
            is_causal=block.is_causal,
            left=block.left,
        )
        return tuple(
            _embed(grad[..., :head_size], within, x.shape[1])
            for grad, within, x in zip(
                grads,
                (block.queries, block.keys, block.keys),
                (query, key, value),
                strict=True,
            )
        )

    def skip():
        return tuple(jnp.zeros_like(x[..., :head_size]) for x in (query, key, value))

    positions = operands.queries.positions, operands.keys.positions
    # Tiles would cost more here than the branch: cuDNN sums their gradients apart.
    grads = _choose(config, positions, compute, skip)
    return Grads(*(grad.astype(lse.dtype) for grad in grads))


def _choose(config: HopConfig, positions, compute, skip, compute_either=None):
    """Compute the block that the positions of queries and keys call for.

    Args:
      config: which blocks there are.
      positions: of queries and keys.
      compute: of a block.
      skip: returns what an empty block gives.
      compute_either: of a ``Choice``, computes that without a branch. If None, two
        blocks are two branches.
    """
    assert config.blocks is not None
    blocks = (config.blocks.same, config.blocks.earlier, config.blocks.later)
    distinct = list(dict.fromkeys(blocks))

    def branch(block: Block):
        return skip if block.is_empty else lambda: compute(block)

    if len(distinct) == 1:
        return branch(distinct[0])()
    same, earlier, later = (distinct.index(block) for block in blocks)
    # Ranks are in the order of their first positions: see Blocks.
    ours, theirs = (x[0] for x in positions)
    index = jnp.where(ours > theirs, earlier, jnp.where(ours < theirs, later, same))
    if compute_either and len(distinct) == 2:
        tiling = common_tiling(distinct[0], distinct[1], *map(len, positions))
        if tiling is not None:
            return compute_either(Choice(tiling, is_second=index == 1))
    return jax.lax.switch(index, [branch(block) for block in distinct])


def _embed(x, within: tuple[int, int], length: int, fill: float = 0):
    """Put (B, length of within, ...) into (B, length, ...)."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (within[0], length - within[1])
    return jnp.pad(x, padding, constant_values=fill)


def _with_delta(query, key, value, out, grad_out, delta):
    """Extend the heads so that cuDNN subtracts ``delta`` and not its own.

    The gradient of a score is weight * (grad_out . value - out . grad_out), and its
    last term lacks the gradient of lse. So out becomes 0, and columns join the heads
    whose product is -delta, in parts, as one number of the short dtype would round it.
    Query and key have 0 there, and do not notice.
    """
    info = jnp.finfo(query.dtype)
    parts, rest = [], delta
    for unit in _PARTS:
        # Unlike a cast to and fro, XLA may not drop it.
        part = jax.lax.reduce_precision(rest / unit, info.nexp, info.nmant)
        parts.append(-part)
        rest = rest - part * unit
    columns = jnp.stack(parts, -1).astype(grad_out.dtype)
    units = jnp.asarray(_PARTS, value.dtype)

    def extend(x, columns):
        padding = [(0, 0)] * (x.ndim - 1) + [(0, _COLUMNS - columns.shape[-1])]
        return jnp.concatenate([x, jnp.pad(columns, padding)], -1)

    def zeros(x):
        return jnp.zeros_like(x[..., : columns.shape[-1]])

    return (
        extend(query, zeros(query)),
        extend(key, zeros(key)),
        extend(value, zeros(value) + units),
        extend(jnp.zeros_like(out), zeros(out)),
        extend(grad_out, columns),
    )
