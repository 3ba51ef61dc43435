"""FlashAttention-3's FFI targets, which an optional package brings as a library.

The package is ``dew-flash-attn-cu12`` or ``-cu13``: Dao-AILab's kernels (BSD-3) behind
plain FFI targets. This is the only file that knows it. Its own Python is not imported:
that loads a library for older GPUs too, twenty times as large.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from typing import NamedTuple

import jax
import numpy as np

from jaxcomm.attention.kernels.flash.pieces import Starts

_PACKAGES = {13: "dew-flash-attn-cu13", 12: "dew-flash-attn-cu12"}
# Those whose targets take and return what is below.
_VERSIONS = (0, 3, 6), (0, 4)
_FILE = "dew_flash_attn/libdew_flash_attn3.so"
# That its library was built for.
_OLDEST_JAX = (0, 11, 2)
TARGETS = tuple(
    f"dew_flash3_mha_{x}" for x in ("fwd", "bwd", "varlen_fwd", "varlen_bwd")
)
# Rows of the backward pass' scratch memory beyond the queries of each sequence.
_SCRATCH_ROWS = 128


class _Lack(NamedTuple):
    """What the library lacks to be used, and whether pip can give it."""

    reason: str
    is_package: bool = False


def install_line() -> str:
    """Return the command that installs the package."""
    return f"pip install 'jaxcomm[flash{_cuda() or 13}]'"


def why_not() -> str | None:
    """Say why the library cannot be used, or None: its targets are registered then."""
    lack = _lack()
    return lack and lack.reason


def missing() -> str | None:
    """Return what :func:`why_not` says where the package alone is missing, or None."""
    lack = _lack()
    return lack.reason if lack and lack.is_package else None


def _lack() -> _Lack | None:
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return _Lack(f"it needs jax {oldest} or newer, and this is {jax.__version__}")
    cuda = _cuda()
    if cuda is None:
        return _Lack("JAX has no CUDA 12 or 13")
    return _register(_PACKAGES[cuda])


@functools.cache
def _register(package: str) -> _Lack | None:
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return _Lack(f"{package} is not installed: {install_line()}", is_package=True)
    version = tuple(int(x) for x in found.version.split(".")[:3] if x.isdigit())
    if not _VERSIONS[0] <= version < _VERSIONS[1]:
        first, end = (".".join(map(str, x)) for x in _VERSIONS)
        return _Lack(
            f"{package} {found.version} is installed, and its targets are known from "
            f"{first} to before {end}: {install_line()}",
            is_package=True,
        )
    try:
        library = ctypes.cdll.LoadLibrary(str(found.locate_file(_FILE)))
        for name in TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
    except (OSError, AttributeError) as error:
        return _Lack(f"{package} {found.version} does not load: {error}")
    return None


@functools.cache
def _cuda() -> int | None:
    """Return which CUDA JAX's plugin is for, or None."""
    for cuda in _PACKAGES:
        if importlib.util.find_spec(f"jax_cuda{cuda}_plugin"):
            return cuda
    return None


def forward(
    query, key, value, starts: Starts | None = None,
    *, scale, is_causal, window, longest=(0, 0),
):  # fmt: skip
    """Call the kernel of the forward pass; can be lowered for CUDA only.

    Args:
      query, key, value: (B, T, N, D), (B, S, K, D) and (B, S, K, D), 16 bits; or (T, N,
        D), (S, K, D) and (S, K, D), packed.
      starts: of packed sequences.
      longest: the most queries, and the most keys, that one of these has.
      scale: factor on the scores.
      is_causal: whether query i of a sequence of T sees its S keys up to ``i + S - T``.
      window: how far it sees to the left and right of that key; -1 for all.

    Returns:
      The output, shaped as the query, and float32 (B, N, T) or (N, T).
    """
    *batch, rows, heads, _ = query.shape
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((*batch, heads, rows), np.float32),
        jax.ShapeDtypeStruct((1, 1, 1, 1), np.float32),
        jax.ShapeDtypeStruct((1, 1, 1), np.float32),
    )
    target = TARGETS[0] if starts is None else TARGETS[2]
    out, lse, _, _ = jax.ffi.ffi_call(target, results)(
        *(query, key, value, *_operands(starts)),
        **_attributes(starts, scale, is_causal, window, longest),
    )
    return out, lse


def backward(
    query, key, value, lse, out, grad_out, starts: Starts | None = None,
    *, scale, is_causal, window, longest=(0, 0),
):  # fmt: skip
    """Call the kernel of the backward pass.

    Args:
      query, key, value, starts: as in :func:`forward`.
      scale, is_causal, window, longest: likewise.
      lse: float32 (B, N, T) or (N, T), over the keys of all hops.
      out, grad_out: shaped as the query, over the keys of all hops.

    Returns:
      Gradients of query, key and value, in their shapes and dtypes; and anything of
      what no sequence has.
    """
    *batch, rows, heads, _ = query.shape
    sequences = batch[0] if starts is None else starts.queries.shape[0] - 1
    scratch = heads * (
        np.prod(batch, dtype=int) * rows + _SCRATCH_ROWS * (sequences + 1)
    )
    results = (
        *(jax.ShapeDtypeStruct(x.shape, query.dtype) for x in (query, key, value)),
        *[jax.ShapeDtypeStruct((int(scratch),), np.float32)] * 2,
    )
    target = TARGETS[1] if starts is None else TARGETS[3]
    *grads, _, _ = jax.ffi.ffi_call(target, results)(
        *(grad_out, query, key, value, out, lse, *_operands(starts)),
        **_attributes(starts, scale, is_causal, window, longest),
    )
    return tuple(grads)


def _operands(starts: Starts | None) -> tuple:
    return () if starts is None else (starts.queries, starts.keys)


def _attributes(
    starts: Starts | None, scale: float, is_causal: bool, window, longest
) -> dict:
    found = {
        "softmax_scale": np.float64(scale),
        "is_causal": is_causal,
        "window_size_left": np.int64(window[0]),
        "window_size_right": np.int64(window[1]),
    }
    if starts is not None:
        numbers = map(np.int64, longest)
        found |= dict(zip(("max_seqlen", "max_seqlen_k"), numbers, strict=True))
    return found
