"""GPUs, and the kernels for them that JAX brings or compiles: cuDNN, Triton."""

import contextlib
import functools
import importlib
import inspect
import warnings

import jax

from jaxcomm import compat

# Older ones have no bfloat16.
OLDEST = (8, 0)
# The limits of cuDNN, as jax.nn.dot_product_attention states them, and of
# FlashAttention-3.
_DTYPES = ("bfloat16", "float16")
LARGEST_HEAD_SIZE = 256
_HEAD_SIZE_STEP = 8


def local() -> list:
    """Return this process's NVIDIA GPUs; starts JAX's backends."""
    try:
        return jax.local_devices(backend="cuda")
    except compat.NO_DEVICES:
        return []


def capabilities(gpus: list) -> set[tuple[int, ...]]:
    """Return the compute capabilities of GPUs, as (9, 0)."""
    return {tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus}


def why_none_serves(gpus: list) -> str | None:
    """Say why these GPUs have no kernels, or None if they may."""
    if not gpus:
        return "JAX finds no NVIDIA GPU"
    oldest = min(capabilities(gpus))
    if oldest < OLDEST:
        found, needed = (".".join(map(str, x)) for x in (oldest, OLDEST))
        return f"a GPU has compute capability {found}, and it needs {needed}"
    return None


def why_not_arrays(hop, *head_sizes: int) -> str | None:
    """Say why a kernel of others cannot compute arrays like a hop's, or None.

    Args:
      hop: its arrays need only shapes and dtypes.
      head_sizes: those that the kernel sees, of keys and of values.
    """
    query, key = hop.query, hop.key
    if query.dtype.name not in _DTYPES:
        return f"it computes in {' and '.join(_DTYPES)}, and query is {query.dtype}"
    for head_size in head_sizes:
        if head_size > LARGEST_HEAD_SIZE or head_size % _HEAD_SIZE_STEP:
            return (
                f"the head size is {head_size}, and it takes multiples of "
                f"{_HEAD_SIZE_STEP} up to {LARGEST_HEAD_SIZE}"
            )
    if not query.size or not key.size:
        return f"there is nothing to compute (query {query.shape}, key {key.shape})"
    return None


def why_not_compiled(hop) -> str | None:
    """Say why a hop that is being lowered cannot call kernels of CUDA, or None."""
    if hop.platform != "cuda":
        return "the program is compiled for a platform that is not CUDA"
    if hop.automatic_axes:
        return (
            f"shard_map leaves the mesh axes {hop.automatic_axes} to XLA, and kernels "
            "are used where all are manual"
        )
    return None


def are_of_mesh() -> bool:
    """Say whether what is traced is for a mesh of GPUs."""
    return compat.mesh_platform() in ("gpu", "cuda")


# cuDNN's attention. All of it was checked on 0.10.2 and 0.11.2, whose functions take
# these, and on 0.12.0.1, where score_mod joined them. They are below JAX's rules for
# partitioning, which need to know the devices, and vmap: jaxcomm has its own.
_CUDNN_OPERANDS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets"),
    *("kv_offsets", "page_table_k", "page_table_v"),
)
_CUDNN_SAVED = ("activation", "fwd_output", "grad_output")
_CUDNN_PARAMETERS = (
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    "sliding_window_length",
)


def _cudnn():
    # Not above: a JAX that keeps it elsewhere is a JAX without it, not an error.
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _cudnn_signatures(*score_mod: str):
    """Return the arguments that are known, of the forward and the backward pass."""
    parameters = (*(f"{name}_args" for name in score_mod), *_CUDNN_PARAMETERS)
    return (
        (*_CUDNN_OPERANDS, *parameters, *score_mod, "is_training"),
        (*_CUDNN_OPERANDS, *_CUDNN_SAVED, *parameters, *score_mod),
    )


def _cudnn_passes():
    cudnn = _cudnn()
    return cudnn._dot_product_attention_fwd_impl, cudnn._dot_product_attention_bwd_impl


def _cudnn_signatures_found():
    return tuple(tuple(inspect.signature(each).parameters) for each in _cudnn_passes())


@functools.cache
def cudnn_attention_mismatch() -> str | None:
    """Say why JAX's calls of cuDNN's attention cannot be used; None if they can."""
    try:
        cudnn = _cudnn()
        _ = cudnn.MaskType.NO_MASK, cudnn.MaskType.CAUSAL, cudnn.AttentionLayout.BTNH
        found = _cudnn_signatures_found()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} keeps cuDNN's attention elsewhere ({error})"
    if found not in (_cudnn_signatures(), _cudnn_signatures("score_mod")):
        return (
            f"jax {jax.__version__} calls cuDNN's attention in a way that this jaxcomm "
            "does not know"
        )
    return None


def cudnn_forward(
    query, key, value, *, scale: float, is_causal: bool, left: int | None = None
):
    """Compute attention with cuDNN; can be lowered for CUDA only.

    Args:
      query: (B, T, N, D) bfloat16 or float16.
      key: (B, S, K, D) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
      scale: factor on the scores.
      is_causal: whether query i sees only keys 0 to i. Else it sees all.
      left: if causal, how many keys before its own a query sees. If None, all of them.

    Returns:
      (out, lse): (B, T, N, V) in that dtype, and (B, N, T) float32, the natural
      logarithm of the sum of exp(scale * query . key).
    """
    operands = query, key, value
    return _call_cudnn(0, operands, (), scale, is_causal, left, is_training=True)


def cudnn_backward(
    query,
    key,
    value,
    lse,
    out,
    grad_out,
    *,
    scale: float,
    is_causal: bool,
    left: int | None = None,
):
    """Compute the gradients of query, key and value, in their dtype.

    Args:
      query, key, value, scale, is_causal, left: as in :func:`cudnn_forward`.
      lse, out: what that returned. Or the same over more keys than these, and the
        gradients are what these keys contribute.
      grad_out: like ``out``.
    """
    operands, saved = (query, key, value), (lse, out, grad_out)
    return _call_cudnn(1, operands, saved, scale, is_causal, left)


def _call_cudnn(index: int, operands, saved, scale, is_causal, left, **more):
    cudnn = _cudnn()
    if _cudnn_signatures_found() == _cudnn_signatures("score_mod"):
        more |= {"score_mod_args": (), "score_mod": None}
    unused = [jax.numpy.zeros(0, operands[0].dtype)] * (len(_CUDNN_OPERANDS) - 3)
    return _cudnn_passes()[index](
        *(*operands, *unused, *saved),
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # No bias, so no gradient of one.
        mask_type=cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        # The query's own key counts.
        sliding_window_length=None if left is None else left + 1,
        **more,
    )


@functools.cache
def triton_mismatch() -> str | None:
    """Say why Pallas cannot make kernels with Triton here; None if it can."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1. Deprecated since 0.11.
    try:
        _triton_parameters()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} makes no kernels with Triton ({error})"
    return None


def why_no_triton_for(device_kind: str) -> str | None:
    """Say why Triton makes no kernels for a kind of GPU, or None."""
    # Since 0.12 JAX has a list of those it knows. Checked on 0.12.0.1.
    try:
        gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        known = gpu_info.gpu_version_from_device_kind
    except (ImportError, AttributeError):
        return None
    if known(device_kind) is not None:
        return None
    return f"jax {jax.__version__} makes no kernels for {device_kind!r}"


def triton_parameters(*, warps: int, stages: int):
    """Return ``compiler_params`` of ``pallas_call`` for a kernel by Triton."""
    return _triton_parameters()(num_warps=warps, num_stages=stages)


@contextlib.contextmanager
def without_triton_warning():
    """Keep JAX from saying in every program that Pallas for Triton is deprecated."""
    message = "The Pallas Triton backend is deprecated"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, DeprecationWarning)
        yield


def _triton_parameters():
    # Not above: it takes a quarter of a second, and few programs need it.
    from jax.experimental.pallas import triton

    return triton.CompilerParams


def cudnn_version() -> int | None:
    """Return cuDNN's version, as 91300 for 9.13.0, or None where JAX has none."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else cuda_versions.cudnn_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None
