"""The stand-in for FlashAttention-3: see tests/doubles/flash/attention.h."""

import ctypes
import functools
import os
import pathlib

import jax
import pytest

TARGETS = [f"dew_flash3_mha_{of}" for of in ("fwd", "bwd", "varlen_fwd", "varlen_bwd")]


@functools.cache
def register():
    """Registers its targets with JAX for CPUs; skips where it was not built."""
    beside = os.environ.get("JAXCOMM_TEST_FAKE_NCCL")
    if not beside:
        pytest.skip("JAXCOMM_TEST_FAKE_NCCL is unset: run it by `make test`")
    path = pathlib.Path(beside).with_name("libjaxcomm_fake_flash.so")
    library = ctypes.CDLL(str(path))
    for name in TARGETS:
        target = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, target, platform="cpu")
