"""Which devices NCCL serves: the only file that knows of the stand-in of tests.

``JAXCOMM_NCCL_LIBRARY`` may name a stand-in for NCCL and the CUDA driver that works on
host memory. Then CPU devices take the place of GPUs. The rest of the package gives
streams work, as on GPUs: what calls it for a CPU device, with a stream, is part of the
stand-in (tests/doubles/nccl/xla.cc).
"""

import ctypes
import functools
from typing import Any

import jax

from jaxcomm import config
from jaxcomm._built import _ffi
from jaxcomm.communicator.backends.nccl import library

_SUFFIX = ".stand_in"


def refusal(platform: str) -> str | None:
    """Return why NCCL cannot serve devices of a platform, None if it can."""
    is_cpu = platform == "cpu"
    if not are_gpus(platform) and not (is_cpu and config.nccl_library()):
        return f"NCCL serves NVIDIA GPUs, not {platform} devices"
    found = library.load()
    if isinstance(found, str):
        return found
    if is_cpu and _play(found.path) is None:
        return f"{found.path} is NCCL itself, which serves no cpu devices"
    return None


def are_gpus(platform: str) -> bool:
    """Return whether XLA has streams, graphs and communicators for the devices."""
    return platform in ("gpu", "cuda")


def target_of_stand_in(collective: str) -> str:
    """Return the name of a collective's custom calls, split-phase ones among them."""
    return f"jaxcomm.{collective}{_SUFFIX}"


def _play(path: str) -> Any:
    """Return the function of the stand-in that plays XLA:GPU, None if it is NCCL."""
    try:
        return getattr(ctypes.CDLL(path), "jaxcommFakeXla", None)
    except OSError:
        return None


@functools.cache
def register_stand_in() -> None:
    """Have XLA:CPU call what plays XLA:GPU, once the type of calls is registered."""
    found = library.load()
    assert not isinstance(found, str)  # a communicator exists
    play = _play(found.path)
    play.restype = ctypes.c_void_p
    play.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype = ctypes.c_void_p
    address.argtypes = [ctypes.py_object, ctypes.c_char_p]
    type_id = address(_ffi.call_site_type()["type_id"], None)
    for target, stages in _ffi.registrations(True).items():
        if target.count(".") == 1 and target != "jaxcomm.done":
            handler = play(address(stages["execute"], None), type_id)
            jax.ffi.register_ffi_target(
                target + _SUFFIX,
                stages | {"execute": jax.ffi.pycapsule(handler)},
                platform="cpu",
            )
