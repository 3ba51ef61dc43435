"""Whether the kernels of ``pallas.py`` can compute a hop, and why not."""

from jaxcomm import compat
from jaxcomm.attention.kernels import gpus

_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST_HEAD_SIZE = 256


def why_not_traced(query, key, value) -> str | None:
    """Say why they cannot compute it whatever the machine, or None if they can.

    Args:
      query, key, value: as in ``Operands``, or what has their shapes and dtypes.
    """
    if query.dtype.name not in _DTYPES:
        return f"they compute in {', '.join(_DTYPES)}, and query is {query.dtype}"
    size = max(query.shape[3], value.shape[3])
    if size > _LARGEST_HEAD_SIZE:
        return f"the head size is {size}, and they take {_LARGEST_HEAD_SIZE} at most"
    if not all(x.size for x in (query, key, value)):
        return f"there is nothing to compute (query {query.shape}, key {key.shape})"
    return compat.triton_mismatch()


def why_not_compiled(ctx, platform: str | None) -> str | None:
    """Say why a program that is being lowered cannot use them, or None.

    They are compiled for the GPUs at hand.

    Args:
      ctx: the lowering context.
      platform: ``"cuda"``, or None for any other.
    """
    reason = gpus.why_not_compiled(ctx, platform)
    if reason is not None:
        return reason
    found = gpus.local()
    return gpus.why_none_serves(found) or compat.why_no_triton_for(found[0].device_kind)
