"""Which devices NCCL serves: the only file that knows of the stand-in of tests.

``JAXCOMM_NCCL_LIBRARY`` may name a library that works on host memory. Then CPU devices
take the place of GPUs.
"""

from jaxcomm import config
from jaxcomm.communicator.backends.nccl import library


def refusal(platform: str) -> str | None:
    """Return why NCCL cannot serve devices of a platform, None if it can."""
    is_cpu = platform == "cpu"
    if not are_gpus(platform) and not (is_cpu and config.nccl_library()):
        return f"NCCL serves NVIDIA GPUs, not {platform} devices"
    found = library.load()
    if isinstance(found, str):
        return found
    if is_cpu and not found.is_stand_in:
        return f"{found.path} is NCCL itself, which serves no cpu devices"
    return None


def are_gpus(platform: str) -> bool:
    """Return whether XLA has streams, graphs and communicators for the devices."""
    return platform in ("gpu", "cuda")
