"""Whether cuDNN's fused attention can compute a ring's hops, and why not.

The first half is known when a program is traced, the second when it is compiled for a
platform.
"""

from typing import NamedTuple

from jaxcomm import compat
from jaxcomm.attention.kernels import gpus
from jaxcomm.attention.kernels.tile_select import common_tiling
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.schedules.block import Block, Blocks

# cuDNN's limits, as jax.nn.dot_product_attention states them.
_DTYPES = ("bfloat16", "float16")
_HEAD_SIZE_STEP = 8
LARGEST_HEAD_SIZE = 256
_LARGEST_HEAD_SIZE_BEFORE_HOPPER = 128
_HOPPER = (9, 0)
_OLDEST_CUDNN = 90000
# Windows of 1,024 and 4,096 tokens are faster than by jaxcomm's kernels on an H100.
# Smaller ones were not measured.
_LEAST_WINDOW = 1024
# The GPUs that need a younger cuDNN.
_YOUNGER_CUDNN: dict[tuple[int, ...], int] = {(10, 3): 91100}


def is_fused(implementation: str | None, reason: str | None) -> bool:
    """Say whether to use cuDNN, given why it cannot be had, or None if it can.

    Raises:
      ValueError: cuDNN was asked for by name and cannot be had.
    """
    if implementation == "cudnn" and reason is not None:
        raise ValueError(
            f"ring_attention: implementation='cudnn' was asked for, but {reason}. Pass "
            "implementation=None for what can be had where cuDNN cannot."
        )
    return implementation in (None, "cudnn") and reason is None


class Fusion(NamedTuple):
    """Whether cuDNN may compute the hops of a call.

    Attributes:
      blocks: what of each hop it computes, or None if it computes nothing.
      reason: why it computes nothing, in words, or None.
    """

    blocks: Blocks | None
    reason: str | None


def fusion(
    implementation: str | None,
    query,
    key,
    value,
    *,
    layouts: tuple[Layout, Layout],
    mask: Mask,
    other: str | None = None,
) -> Fusion:
    """Say what of each hop cuDNN computes.

    Args:
      implementation: as given to ``ring_attention``.
      query, key, value: (B, T, N, D), (B, S, K, D) and (B, S, K, V), the local blocks.
      layouts: of the queries and of the keys.
      mask: the call's.
      other: what else keeps cuDNN from it, in words, or None.

    Raises:
      ValueError: cuDNN was asked for by name and cannot compute this.
    """
    reason = other or _why_not_traced(query, key, value, mask, layouts)
    is_small = mask.left is not None and mask.left < _LEAST_WINDOW
    if reason is None and is_small and implementation != "cudnn":
        reason = (
            f"it computes windows of fewer than {_LEAST_WINDOW} tokens by name only"
        )
    blocks = None
    if reason is None:
        queries, keys = query.shape[1], key.shape[1]
        layout = layouts[0]
        if mask.is_everything or mask.left is not None:
            left = mask.left if (mask.left or 0) < keys - 1 else None
            whole = Block((0, queries), (0, keys), mask.right == 0, left)
            blocks = Blocks(whole, whole, whole)
        elif layout == layouts[1]:
            blocks = layout.schedule.blocks(queries)
        if blocks is None:
            reason = (
                f"the schedule {layout.schedule.name!r} does not say which blocks a "
                "causal ring computes"
            )
        elif layout.size == 1:
            blocks = Blocks(blocks.same, blocks.same, blocks.same)
    fused = is_fused(implementation, reason)
    return Fusion(blocks if fused else None, reason)


def parts_of_queries(blocks: Blocks | None, queries: int, keys: int) -> int:
    """Return in how many equal parts cuDNN computes the queries of most hops.

    Args:
      blocks: what cuDNN computes of each hop, if it does.
      queries, keys: local lengths.
    """
    if blocks is None or blocks.earlier == blocks.later:
        return 1
    tiling = common_tiling(blocks.earlier, blocks.later, queries, keys)
    return 1 if tiling is None else queries // tiling.queries.size


def _why_not_traced(query, key, value, mask: Mask, layouts) -> str | None:
    if not all(layout.is_static for layout in layouts):
        return "the layout is data, and cuDNN's masks are rules"
    if query.dtype.name not in _DTYPES:
        return f"it computes in {' and '.join(_DTYPES)}, and query is {query.dtype}"
    head_size = query.shape[3]
    if head_size > LARGEST_HEAD_SIZE or head_size % _HEAD_SIZE_STEP:
        return (
            f"the head size is {head_size}, and it takes multiples of "
            f"{_HEAD_SIZE_STEP} up to {LARGEST_HEAD_SIZE}"
        )
    if value.shape[3] != head_size:
        return (
            f"heads of keys have size {head_size} and those of values {value.shape[3]}"
        )
    if mask.left is not None or mask.right not in (None, 0):
        reason = _why_not_window(mask, layouts)
        if reason is not None:
            return reason
    if not query.size or not key.size:
        return f"there is nothing to compute (query {query.shape}, key {key.shape})"
    size = layouts[0].size
    held = tuple(layout.size * layout.local_length for layout in layouts)
    if (mask.query_length, mask.key_length) != held:
        return (
            f"the {size} ranks hold {held[0]} queries and {held[1]} keys, of which "
            f"{mask.query_length} and {mask.key_length} are no padding, and it masks "
            "no padding"
        )
    return None


def _why_not_window(mask: Mask, layouts) -> str | None:
    if mask.left is None or mask.right != 0:
        return "its windows end at the query's own key"
    if layouts[0] != layouts[1] or not layouts[0].is_natural or layouts[0].size > 1:
        return "it takes a window where one rank holds all tokens in natural order"
    return None


def fused_attention_reason(head_size: int = 64) -> str | None:
    """Say why ``ring_attention`` does not use cuDNN on this machine's GPUs.

    Starts JAX's backends.

    Args:
      head_size: that of the attention.

    Returns:
      None where it does, given inputs that cuDNN takes.

    >>> fused_attention_reason()  # on a machine without a GPU
    'JAX finds no NVIDIA GPU'
    """
    reason = compat.cudnn_attention_mismatch()
    return reason or _why_not_on(gpus.local(), head_size)


def why_not_compiled(
    ctx, platform: str | None, implementation: str | None, head_size: int
) -> str | None:
    """Say why a program that is being lowered cannot use cuDNN.

    Args:
      ctx: the lowering context.
      platform: ``"cuda"``, or None for any other.
      implementation: asked for by name, it is used without a GPU to ask: the program
        may be compiled for another machine.
      head_size: of the attention to compute.
    """
    if head_size > LARGEST_HEAD_SIZE:
        return (
            f"return_residual=True makes the head size {head_size} in the backward "
            f"pass, and it takes {LARGEST_HEAD_SIZE} at most"
        )
    reason = gpus.why_not_compiled(ctx, platform)
    found = gpus.local() if reason is None else []
    if reason is not None or (implementation == "cudnn" and not found):
        return reason
    return _why_not_on(found, head_size)


def _why_not_on(found: list, head_size: int) -> str | None:
    reason = gpus.why_none_serves(found)
    if reason is not None:
        return reason
    version = compat.cudnn_version()
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
            f"{_dotted(oldest)} it takes {_LARGEST_HEAD_SIZE_BEFORE_HOPPER} at most"
        )
    return None


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
