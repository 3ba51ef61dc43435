"""cuDNN's fused attention, which only programs for CUDA can call.

Source: Dao, FlashAttention-2, 2023, for what it computes.
"""

import dataclasses

from jaxcomm.attention.kernels.blocks import COLUMNS, BlockKernel
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.mask import Block
from jaxcomm.compat import gpus

# Windows of 1,024 and 4,096 tokens are faster than by jaxcomm's kernels on an H100.
# Smaller ones were not measured.
_LEAST_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Cudnn(BlockKernel):
    """cuDNN's kernels. They round the output to the query's dtype, and not its lse."""

    name = "cudnn"

    def why_not(self, hop):
        is_named = hop.kernels == (self,)
        reason = gpus.cudnn_attention_mismatch() or _why_not(hop, is_named)
        if reason is not None or hop.platform is None:
            return reason
        head_size = hop.query.shape[3]
        if hop.is_backward and hop.has_residual:
            head_size += COLUMNS
        if head_size > gpus.LARGEST_HEAD_SIZE:
            return (
                f"return_residual=True makes the head size {head_size} in the backward "
                f"pass, and it takes {gpus.LARGEST_HEAD_SIZE} at most"
            )
        return _why_not_compiled(hop, head_size, is_named)

    def attend(self, hop, block, query, key, value):
        return gpus.cudnn_forward(query, key, value, **_options(hop, block))

    def gradients(self, hop, block, arrays, out, lse, grad_out):
        query, key, value = arrays
        return gpus.cudnn_backward(
            query, key, value, lse, out, grad_out, **_options(hop, block)
        )


def _options(hop: Hop, block: Block) -> dict:
    return {"scale": hop.scale, "is_causal": block.right == 0, "left": block.left}


def _why_not(hop: Hop, is_named: bool) -> str | None:
    """Say why it cannot compute a hop whatever the machine, or None if it can."""
    reason = gpus.why_not_arrays(hop, hop.query.shape[3])
    if reason is not None:
        return reason
    for block in hop.blocks:
        if block.is_whole:
            continue
        rows, columns = block.shape
        left = 0 if block.left is None else block.left
        if block.right not in (0, None) or (block.right is None and left < 0):
            return "its windows end at the query's own key, or at the last"
        if block.right == 0 and rows != columns:
            return f"a causal block of {rows} queries and {columns} keys is no square"
        if block.left is None:
            continue
        if hop.has_residual:
            # Its backward pass would have larger heads, which no GPU has shown.
            return "it is used without a window where return_residual=True"
        # Of a border its rows are as many as the window.
        window = (rows if block.right is None else block.left) + 1
        if window < (0 if is_named else _LEAST_WINDOW):
            return (
                f"it computes windows of fewer than {_LEAST_WINDOW} tokens by name only"
            )
    return None


CUDNN = Cudnn()


_LARGEST_HEAD_SIZE_BEFORE_HOPPER = 128
_HOPPER = (9, 0)
_OLDEST_CUDNN = 90000
# That bounds what is seen on the left alone; and one that does it wrong.
_OLDEST_CUDNN_OF_BORDERS, _WRONG_CUDNN_OF_BORDERS = 91002, 91400
# The GPUs that need a younger cuDNN.
_YOUNGER_CUDNN: dict[tuple[int, ...], int] = {(10, 3): 91100}


def fused_attention_reason(head_size: int = 64) -> str | None:
    """Say why ``ring_attention`` does not use cuDNN on this machine's GPUs.

    Starts JAX's backends.

    Returns:
      None where it does, given inputs that cuDNN takes.

    >>> fused_attention_reason()  # on a machine without a GPU
    'JAX finds no NVIDIA GPU'
    """
    reason = gpus.cudnn_attention_mismatch()
    return reason or _why_not_on(gpus.local(), head_size)


def _why_not_compiled(hop: Hop, head_size: int, is_named: bool) -> str | None:
    """Say why a program that is being lowered cannot use cuDNN.

    Args:
      hop: for its platform.
      head_size: that cuDNN sees.
      is_named: asked for by name, it is used without a GPU to ask: the program may be
        compiled for another machine.
    """
    reason = gpus.why_not_compiled(hop)
    found = gpus.local() if reason is None else []
    if reason is not None or (is_named and not found):
        return reason
    return _why_not_on(found, head_size) or _why_no_borders(hop.blocks)


def _why_no_borders(blocks: tuple[Block, ...]) -> str | None:
    version = gpus.cudnn_version()
    are_borders = [block.right is None and block.left is not None for block in blocks]
    if not any(are_borders) or version is None:
        return None
    if version < _OLDEST_CUDNN_OF_BORDERS or version == _WRONG_CUDNN_OF_BORDERS:
        return (
            f"the cuDNN found has version {version}, and for the border of a window "
            f"{_OLDEST_CUDNN_OF_BORDERS} is needed, and not {_WRONG_CUDNN_OF_BORDERS}"
        )
    return None


def _why_not_on(found: list, head_size: int) -> str | None:
    reason = gpus.why_none_serves(found)
    if reason is not None:
        return reason
    version = gpus.cudnn_version()
    if version is None:
        return "JAX finds no cuDNN"
    capabilities = gpus.capabilities(found)
    oldest = min(capabilities)
    needed = max([_OLDEST_CUDNN, *(_YOUNGER_CUDNN.get(x, 0) for x in capabilities)])
    if version < needed:
        return f"the cuDNN found has version {version}, and {needed} is needed"
    if oldest < _HOPPER and head_size > _LARGEST_HEAD_SIZE_BEFORE_HOPPER:
        return (
            f"the head size is {head_size}, and on a GPU of compute capability "
            f"{'.'.join(map(str, oldest))} it takes "
            f"{_LARGEST_HEAD_SIZE_BEFORE_HOPPER} at most"
        )
    return None
