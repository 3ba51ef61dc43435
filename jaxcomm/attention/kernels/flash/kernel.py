"""FlashAttention-3, for GPUs of compute capability 9.0.

Source: Shah et al., FlashAttention-3, 2024.
"""

import dataclasses
import os

import jax.numpy as jnp

from jaxcomm.attention.kernels.blocks import COLUMNS, BlockKernel
from jaxcomm.attention.kernels.cudnn import CUDNN
from jaxcomm.attention.kernels.flash import library, packed, sequences
from jaxcomm.attention.kernels.kernel import Grads, Hop
from jaxcomm.attention.mask import Block, Run
from jaxcomm.compat import gpus

_CAPABILITY = (9, 0)
# Its gradients of queries are summed in the order in which blocks end.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class Flash(BlockKernel):
    """FlashAttention-3's kernels. They round the output to the query's dtype."""

    name = "flash"
    options = frozenset({"segment_ids"})
    by_runs = True

    def why_not(self, hop):
        reason = _why_not(hop)
        if reason is not None or hop.platform is None:
            return reason
        reason = gpus.why_not_compiled(hop)
        found = gpus.local() if reason is None else []
        # By name it is used without a GPU to ask: the program may be for another one.
        if reason is not None or (hop.kernels == (self,) and not found):
            return reason
        reason = why_not_on(found)
        if reason is not None or hop.kernels == (self,):
            return reason
        pads = hop.query.shape[3] != hop.value.shape[3]
        if pads and _is_block(hop) and CUDNN.why_not(hop) is None:
            return "cuDNN computes values of another head size without padding them"
        return None

    def forward(self, hop):
        size, hop = hop.value.shape[3], _of_one_size(_chosen(hop))
        out, lse = super().forward(hop) if _is_block(hop) else packed.forward(hop)
        return _cut(out, size), lse

    def backward(self, hop, saved):
        given, hop = (hop.query, hop.key, hop.value), _of_one_size(_chosen(hop))
        size = hop.query.shape[3]
        saved = saved._replace(
            grad_out=_grown(saved.grad_out, size), out=_grown(saved.out, size)
        )
        compute = super().backward if _is_block(hop) else packed.backward
        grads = compute(hop, saved)
        return Grads(*(_cut(x, y.shape[3]) for x, y in zip(grads, given, strict=False)))

    def attend(self, hop, block, query, key, value):
        seen, options = _options(hop, block)
        rows, columns = slice(*seen.queries), slice(*seen.keys)
        out, lse = library.forward(
            query[:, rows], key[:, columns], value[:, columns], **options
        )
        before, behind = seen.queries[0], query.shape[1] - seen.queries[1]
        if not before and not behind:
            return out, lse
        lse = jnp.pad(lse, ((0, 0), (0, 0), (before, behind)), constant_values=-jnp.inf)
        return jnp.pad(out, ((0, 0), (before, behind), (0, 0), (0, 0))), lse

    def gradients(self, hop, block, arrays, out, lse, grad_out):
        query, key, value = arrays
        seen, options = _options(hop, block)
        rows, columns = slice(*seen.queries), slice(*seen.keys)
        grads = library.backward(
            query[:, rows],
            key[:, columns],
            value[:, columns],
            lse[:, :, rows],
            out[:, rows],
            grad_out[:, rows],
            **options,
        )

        def whole(grad, part, x):
            padding = [(0, 0)] * 4
            padding[1] = (part[0], x.shape[1] - part[1])
            return jnp.pad(grad, padding)

        parts = seen.queries, seen.keys, seen.keys
        return tuple(map(whole, grads, parts, arrays))


def why_not_on(found: list) -> str | None:
    """Say why it does not serve these GPUs, or None."""
    reason = gpus.why_none_serves(found)
    if reason is None and gpus.capabilities(found) != {_CAPABILITY}:
        return "it is made for GPUs of compute capability 9.0 alone"
    return reason or library.why_not()


def _of_one_size(hop: Hop) -> Hop:
    """Return a hop whose keys and values have heads of one size, padded with 0."""
    size = _size(hop)
    arrays = {name: getattr(hop, name) for name in ("query", "key", "value")}
    return hop.replace(**{name: _grown(x, size) for name, x in arrays.items()})


def _size(hop: Hop) -> int:
    return max(hop.query.shape[3], hop.value.shape[3])


def _grown(x, size: int):
    grows = size > x.shape[3]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])]) if grows else x


def _cut(x, size: int):
    return x[..., :size] if size < x.shape[3] else x


def _is_block(hop: Hop) -> bool:
    """Whether a hop is a block; else its runs are computed."""
    has_rows = any(x.positions.ndim > 1 for x in (hop.queries, hop.keys))
    return bool(hop.blocks) and hop.queries.segment_ids is None and not has_rows


def _chosen(hop: Hop) -> Hop:
    """Return a hop of one of several blocks as a run: which is where sequences begin.

    Where the blocks are hidden in other ways a branch has to choose.
    """
    if not _is_block(hop) or len(hop.blocks) == 1:
        return hop
    bounds = {(each.left, each.right) for each in hop.blocks if not each.is_empty}
    are_squares = all(x.is_empty or x.shape[0] == x.shape[1] for x in hop.blocks)
    if bounds == {(None, 0)} and are_squares:
        are = "same"
    elif bounds == {(None, None)}:
        are = "apart"
    else:
        return hop
    run = Run((0, hop.query.shape[1]), (0, hop.key.shape[1]), are, False)
    run = dataclasses.replace(run, starts=sequences.of_blocks(hop, run))
    return hop.replace(blocks=(), block=None, runs=(run,))


def _options(hop: Hop, block: Block) -> tuple[Block, dict]:
    """Return the part of a block that is not hidden, and what the kernel is told."""
    seen = _trimmed(block)
    rows, columns = seen.shape
    # The kernel counts from the key that is as far from the last as the query is.
    offset = columns - rows
    left = -1 if seen.left is None else seen.left + offset
    right = -1 if seen.right is None else seen.right - offset
    is_causal = right == 0
    # A bound that nothing is beyond is none.
    left = -1 if left >= columns - 1 else left
    right = -1 if right >= rows - 1 else right
    window = left, 0 if is_causal else right
    return seen, {"scale": hop.scores.scale, "is_causal": is_causal, "window": window}


def _trimmed(block: Block) -> Block:
    """Return the rectangle from the first to the last query and key that meet.

    Its queries and keys count from the block's first; its bounds from its own.

    >>> _trimmed(Block((0, 4), (0, 8), left=None, right=2))
    Block(queries=(0, 4), keys=(0, 6), left=None, right=2)
    """
    rows, columns = block.shape
    first, end = 0, rows
    if block.right is not None:
        first = min(max(first, -block.right), rows)
    if block.left is not None:
        end = max(min(end, columns + block.left), first)
    key, key_end = 0, columns
    if block.left is not None:
        key = min(max(key, first - block.left), columns)
    if block.right is not None:
        key_end = max(min(key_end, end + block.right), key)
    shift = first - key
    left, right = block.left, block.right
    return Block(
        (first, end),
        (key, key_end),
        None if left is None else left - shift,
        None if right is None else right + shift,
    )


def _why_not(hop: Hop) -> str | None:
    """Say why it cannot compute a hop whatever the machine, or None if it can."""
    query, has_columns = hop.query, hop.is_backward and hop.has_residual
    reason = gpus.why_not_arrays(hop, _size(hop) + has_columns * COLUMNS)
    if reason is not None:
        return reason
    if hop.queries.segment_ids is not None:
        if not hop.runs:
            return (
                "it takes documents where a rank's keys are its own, or all in their "
                "natural order"
            )
        if hop.platform is not None and not hop.is_packed:
            return "nothing says where the documents begin"
    if hop.is_backward and _DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
        return f"its gradients are not deterministic, which {_DETERMINISTIC} asks for"
    if hop.scores.scale <= 0:
        return f"it takes a positive scale, and this is {hop.scores.scale}"
    # Its numbers of elements have 32 bits.
    numbers = query.shape[1] * query.shape[2] * gpus.LARGEST_HEAD_SIZE
    if query.shape[0] > 1 and numbers >= 2**31:
        return f"a query of shape {query.shape} is too large for it in a batch"
    if _is_block(hop):
        return None
    return packed.why_not(hop) if hop.runs else None


FLASH = Flash()
