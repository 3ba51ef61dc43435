"""Which kernel computes a hop: cuDNN's, one of our own, or XLA's tiles."""

import functools
import warnings

from jaxcomm.attention.kernels import cudnn_support, gpus, pallas_support
from jaxcomm.attention.kernels.operands import HopConfig, Operands

IMPLEMENTATIONS = ("cudnn", "pallas", "xla")
# Operations of a hop are named after it and the implementation: see kernels_of.py.
SCOPE = "jaxcomm.attention."


def check_implementation(implementation: str | None) -> None:
    """Raise ValueError unless it is None, or one of :data:`IMPLEMENTATIONS`."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"ring_attention: implementation={implementation!r} is not known. Pass "
            "'cudnn', 'pallas', 'xla', or None for the fastest that can be had."
        )


def select(
    ctx, platform: str | None, operands: Operands, config: HopConfig, head_size: int
) -> str:
    """Return which of :data:`IMPLEMENTATIONS` computes a hop that is being lowered.

    Warns where XLA's tiles are what is left on a GPU.

    Args:
      ctx: the lowering context.
      platform: ``"cuda"``, or None for any other.
      operands: what has the shapes and dtypes of the hop's arrays.
      config: the hop's.
      head_size: the one that cuDNN sees.

    Raises:
      ValueError: the one that was asked for by name cannot be had.
    """
    asked = config.implementation
    if config.blocks is not None:
        reason = cudnn_support.why_not_compiled(ctx, platform, asked, head_size)
        if not operands.has_shared_tokens:
            reason = "the sequences of the batch differ in their positions"
        if cudnn_support.is_fused(asked, reason):
            return "cudnn"
    if asked == "xla":
        return asked
    reason = pallas_support.why_not_traced(*operands[:3])
    if reason is None:
        reason = pallas_support.why_not_compiled(ctx, platform)
    if reason is None:
        return "pallas"
    if asked == "pallas":
        raise ValueError(
            "ring_attention: implementation='pallas' was asked for, but not these "
            f"kernels: {reason}. Pass implementation=None for what can be had."
        )
    if platform == "cuda":
        _warn_of_tiles(reason, config.not_fused)
    return "xla"


def may_be_kernel(query, key, value, *, implementation: str | None, blocks) -> bool:
    """Say whether hops are traced for a mesh of GPUs, and a kernel can compute them.

    Args:
      query, key, value: as in ``Operands``.
      implementation, blocks: as in ``HopConfig``.
    """
    if implementation == "xla" or not gpus.are_of_mesh():
        return False
    if blocks is not None:
        return True
    return pallas_support.why_not_traced(query, key, value) is None


def _warn_of_tiles(reason: str, not_cudnn: str | None) -> None:
    if gpus.local():
        _warn_once(reason, not_cudnn or reason)


@functools.cache
def _warn_once(reason: str, not_cudnn: str) -> None:
    warnings.warn(
        "ring_attention: XLA computes this tile by tile, many times slower than "
        f"a kernel. Not cuDNN: {not_cudnn}. Not jaxcomm's kernels: {reason}. Pass "
        "implementation='xla' if that is meant.",
        RuntimeWarning,
        stacklevel=2,
    )
