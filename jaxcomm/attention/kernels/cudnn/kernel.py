"""cuDNN's fused attention, which only programs for CUDA can call.

Source: Dao, FlashAttention-2, 2023, for what it computes.
"""

import dataclasses

from jaxcomm import compat
from jaxcomm.attention.kernels.blocks import BlockKernel
from jaxcomm.attention.kernels.cudnn import support
from jaxcomm.attention.kernels.delta import COLUMNS
from jaxcomm.attention.kernels.hop import Hop
from jaxcomm.attention.schedules.block import Block

# cuDNN's limits, as jax.nn.dot_product_attention states them.
_DTYPES = ("bfloat16", "float16")
_HEAD_SIZE_STEP = 8
_LARGEST_HEAD_SIZE = 256
# Windows of 1,024 and 4,096 tokens are faster than by jaxcomm's kernels on an H100.
# Smaller ones were not measured.
_LEAST_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Cudnn(BlockKernel):
    """cuDNN's kernels. They round the output to the query's dtype, and not its lse."""

    name = "cudnn"

    def why_not(self, hop):
        is_named = hop.kernels == (self,)
        reason = compat.cudnn_attention_mismatch() or _why_not(hop, is_named)
        if reason is not None or hop.platform is None:
            return reason
        head_size = hop.query.shape[3]
        if hop.is_backward and hop.has_residual:
            head_size += COLUMNS
        if head_size > _LARGEST_HEAD_SIZE:
            return (
                f"return_residual=True makes the head size {head_size} in the backward "
                f"pass, and it takes {_LARGEST_HEAD_SIZE} at most"
            )
        return support.why_not_compiled(hop, head_size, is_named)

    def attend(self, hop, block, query, key, value):
        return compat.cudnn_forward(query, key, value, **_options(hop, block))

    def gradients(self, hop, block, arrays, out, lse, grad_out):
        query, key, value = arrays
        return compat.cudnn_backward(
            query, key, value, lse, out, grad_out, **_options(hop, block)
        )


def _options(hop: Hop, block: Block) -> dict:
    return {"scale": hop.scale, "is_causal": block.right == 0, "left": block.left}


def _why_not(hop: Hop, is_named: bool) -> str | None:
    """Say why it cannot compute a hop whatever the machine, or None if it can."""
    query, key, value = hop.query, hop.key, hop.value
    if query.dtype.name not in _DTYPES:
        return f"it computes in {' and '.join(_DTYPES)}, and query is {query.dtype}"
    head_size = query.shape[3]
    if head_size > _LARGEST_HEAD_SIZE or head_size % _HEAD_SIZE_STEP:
        return (
            f"the head size is {head_size}, and it takes multiples of "
            f"{_HEAD_SIZE_STEP} up to {_LARGEST_HEAD_SIZE}"
        )
    if value.shape[3] != head_size:
        return (
            f"heads of keys have size {head_size} and those of values {value.shape[3]}"
        )
    if not query.size or not key.size:
        return f"there is nothing to compute (query {query.shape}, key {key.shape})"
    for block in hop.blocks:
        if block.is_whole:
            continue
        rows, columns = block.shape
        if block.right != 0:
            return "its windows end at the query's own key"
        if rows != columns:
            return f"a causal block of {rows} queries and {columns} keys is no square"
        if block.left is None:
            continue
        if hop.has_residual:
            # Its backward pass would have larger heads, which no GPU has shown.
            return "it is used without a window where return_residual=True"
        if block.left < (0 if is_named else _LEAST_WINDOW):
            return (
                f"it computes windows of fewer than {_LEAST_WINDOW} tokens by name only"
            )
    return None


CUDNN = Cudnn()
