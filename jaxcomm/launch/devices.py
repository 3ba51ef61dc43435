"""Which devices of this host its processes get, and what is said of that."""

import dataclasses
import glob
import importlib.util
from collections.abc import Mapping

from jaxcomm.launch.options import Options

CPU = "cpu"
# Where one process cannot share a device with another.
GPUS = ("cuda", "gpu", "rocm")
# As of JAX alone, which also has the CPU for callbacks and the like.
_CUDA = "cuda,cpu"
# The driver of NVIDIA has a device for each of them.
_FILES = "/dev/nvidia[0-9]*"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class Devices:
    """A choice of devices.

    Attributes:
      platform: for JAX_PLATFORMS.
      text: what the launcher says; empty if there is nothing to say.
    """

    platform: str
    text: str = ""


def ids_of(place: int, devices_per_process: int | None) -> range:
    """Return which GPUs the process at a place of its host has: one each."""
    count = devices_per_process or 1
    return range(place * count, (place + 1) * count)


def choose(options: Options, environment: Mapping[str, str]) -> Devices:
    """Return what the user chose, else GPUs if there are enough, as JAX would.

    Args:
      options: what was asked for.
      environment: of the launcher.
    """
    gpus = _gpus(environment)
    chosen = options.platform or environment.get("JAX_PLATFORMS")
    if chosen:
        is_ours = "JAX_LOCAL_DEVICE_IDS" not in environment
        serves = chosen.split(",")[0] in GPUS and (
            is_ours or options.devices_per_process is not None
        )
        return Devices(chosen, _text(options, gpus) if serves and gpus else "")
    if not gpus:
        return Devices(CPU)
    needed = len(ids_of(0, options.devices_per_process)) * options.processes
    if not _has_cuda():
        why = "this Python has no JAX for CUDA. Install jax[cuda13]"
    elif needed > len(gpus):
        why = f"the processes need {needed}. Start fewer"
    else:
        return Devices(_CUDA, _text(options, gpus))
    count = f"{len(gpus)} GPUs" if len(gpus) > 1 else "a GPU"
    return Devices(
        CPU,
        f"the processes use the CPU: this host has {count}, and {why}, or say "
        "--platform cpu",
    )


def _gpus(environment) -> list[str]:
    """Return the names of the GPUs that processes see, without starting CUDA."""
    visible = environment.get(_VISIBLE)
    if visible is None:
        return [str(number) for number in range(len(glob.glob(_FILES)))]
    return [
        name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")
    ]


def _has_cuda() -> bool:
    return any(map(importlib.util.find_spec, _PLUGINS))


def _text(options, gpus) -> str:
    given = []
    for place in range(options.processes):
        ids = ids_of(place, options.devices_per_process)
        names = [gpus[each] for each in ids if each < len(gpus)] or ["none"]
        several = "s" if len(names) > 1 else ""
        given.append(
            f"GPU{several} {', '.join(names)} to process {options.first + place}"
        )
    return "; ".join(given)
