"""Whether cuDNN's fused attention serves the GPUs of a machine, and why not."""

from jaxcomm import compat
from jaxcomm.attention.kernels import gpus
from jaxcomm.attention.kernels.hop import Hop

_LARGEST_HEAD_SIZE_BEFORE_HOPPER = 128
_HOPPER = (9, 0)
_OLDEST_CUDNN = 90000
# The GPUs that need a younger cuDNN.
_YOUNGER_CUDNN: dict[tuple[int, ...], int] = {(10, 3): 91100}


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


def why_not_compiled(hop: Hop, head_size: int, is_named: bool) -> str | None:
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
            f"{'.'.join(map(str, oldest))} it takes "
            f"{_LARGEST_HEAD_SIZE_BEFORE_HOPPER} at most"
        )
    return None
