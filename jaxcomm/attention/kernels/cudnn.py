"""cuDNN's fused attention, which only programs for CUDA can call.

Source: Dao, FlashAttention-2, 2023, for what it computes.
"""

import dataclasses

from jaxcomm.attention.kernels.blocks import COLUMNS, BlockKernel
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.pairs import Block
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
        columns = COLUMNS * (hop.is_backward and hop.has_residual)
        sizes = _sizes(hop, columns)
        if max(sizes) > gpus.LARGEST_HEAD_SIZE:
            return (
                f"return_residual=True makes the head size {max(sizes)} in the "
                f"backward pass, and it takes {gpus.LARGEST_HEAD_SIZE} at most"
            )
        return _why_not_compiled(hop, sizes, is_named)

    def attend(self, hop, block, query, key, value):
        return gpus.cudnn_forward(query, key, value, **_options(hop, block))

    def gradients(self, hop, block, arrays, out, lse, grad_out):
        query, key, value = arrays
        return gpus.cudnn_backward(
            query, key, value, lse, out, grad_out, **_options(hop, block)
        )


def _sizes(hop: Hop, columns: int = 0) -> tuple[int, int]:
    """Return the sizes of the heads of keys and of values, grown by columns."""
    return hop.query.shape[3] + columns, hop.value.shape[3] + columns


def _options(hop: Hop, block: Block) -> dict:
    scale, right = hop.scores.scale, block.right
    return {"scale": scale, "is_causal": right == 0, "left": block.left}


def _why_not(hop: Hop, is_named: bool) -> str | None:
    """Say why it cannot compute a hop whatever the machine, or None if it can."""
    reason = gpus.why_not_arrays(hop, *_sizes(hop))
    if reason is not None:
        return reason
    for block in hop.pairs.blocks:
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


_HOPPER, _BLACKWELL, _AFTER_BLACKWELL = (9, 0), (10, 0), (11, 0)
# Keys and values of multi-head latent attention.
_LATENT = (192, 128)
_OLDEST_CUDNN = 90000
# Known to err in attention, says NVIDIA's cudnn-frontend.
_WRONG_CUDNN = (91000, 91001)
# That bounds what is seen on the left alone; and one that does it wrong.
_OLDEST_CUDNN_OF_BORDERS, _WRONG_CUDNN_OF_BORDERS = 91002, 91400
# The GPUs that need a younger cuDNN.
_YOUNGER_CUDNN: dict[tuple[int, ...], int] = {(10, 3): 91100}


def fused_attention_reason(
    head_size: int = 64, value_size: int | None = None
) -> str | None:
    """Say why ``ring_attention`` does not use cuDNN on this machine's GPUs.

    Starts JAX's backends.

    Args:
      head_size, value_size: of keys, and of values; the same if None.

    Returns:
      None where it does, forward and backward, given inputs that cuDNN takes.

    >>> fused_attention_reason()  # on a machine without a GPU
    'JAX finds no NVIDIA GPU'
    """
    sizes = head_size, head_size if value_size is None else value_size
    reason = gpus.cudnn_attention_mismatch()
    return reason or _why_not_on(gpus.local(), sizes, is_backward=True)


def _why_not_compiled(hop: Hop, sizes: tuple[int, int], is_named: bool) -> str | None:
    """Say why a program that is being lowered cannot use cuDNN.

    Args:
      hop: for its platform.
      sizes: of the heads of keys and values that cuDNN sees.
      is_named: asked for by name, it is used without a GPU to ask: the program may be
        compiled for another machine.
    """
    reason = gpus.why_not_compiled(hop)
    found = gpus.local() if reason is None else []
    if reason is not None or (is_named and not found):
        return reason
    reason = _why_not_on(found, sizes, hop.is_backward)
    return reason or _why_no_borders(hop.pairs.blocks)


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


def _why_not_on(found: list, sizes: tuple[int, int], is_backward: bool) -> str | None:
    reason = gpus.why_none_serves(found)
    if reason is not None:
        return reason
    version = gpus.cudnn_version()
    if version is None:
        return "JAX finds no cuDNN"
    capabilities = gpus.capabilities(found)
    needed = max([_OLDEST_CUDNN, *(_YOUNGER_CUDNN.get(x, 0) for x in capabilities)])
    if version in _WRONG_CUDNN:
        needed = max(needed, _WRONG_CUDNN[-1] + 1)
    if version < needed:
        return f"the cuDNN found has version {version}, and {needed} is needed"
    for capability in sorted(capabilities):
        needed = _oldest_cudnn_of(sizes, capability, is_backward)
        if needed is None or version < needed:
            gpu = f"a GPU of compute capability {'.'.join(map(str, capability))}"
            return _why_not_sizes(sizes, gpu, needed, version)
    return None


def _why_not_sizes(
    sizes: tuple[int, int], gpu: str, needed: int | None, version: int
) -> str:
    key, value = sizes
    heads = f"the head size is {key}"
    if key != value:
        heads = f"heads of keys have size {key} and those of values {value}"
    if needed is None:
        return f"{heads}, and it takes no such heads on {gpu}"
    return f"{heads}, for which {gpu} needs cuDNN {needed}, and {version} was found"


def _oldest_cudnn_of(
    sizes: tuple[int, int], capability: tuple[int, ...], is_backward: bool
) -> int | None:
    """Return the cuDNN that computes heads of these sizes on a GPU, or None.

    Source: JAX's check for the forward pass. It allows gradients that cuDNN has no
    kernel for: of those, what NVIDIA's cudnn-frontend supports.
    """
    are_equal, are_small = sizes[0] == sizes[1], max(sizes) <= 128
    if capability < _HOPPER and not (are_equal and are_small):
        return None
    oldest = _OLDEST_CUDNN if are_equal else 91002
    if are_small or (not is_backward and capability < _BLACKWELL):
        return oldest
    if not is_backward:
        return max(oldest, 90900)
    if capability >= _AFTER_BLACKWELL:
        return None
    if capability >= _BLACKWELL:
        return {_LATENT: 91100, (256, 256): 92300}.get(sizes)
    return 90500 if are_equal else oldest if sizes == _LATENT else 91300
