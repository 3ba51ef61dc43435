"""What is free on this process's devices, and what is ours.

The CUDA driver tells what is free: JAX knows its own pool only.
"""

import ctypes

import jax

import jaxcomm
from jaxcomm.communicator.backends.nccl import library


def free_bytes() -> int:
    """Returns what is free on the devices of this process together.

    Raises:
      RuntimeError: the driver cannot be found, or refuses.
    """
    found = library.load()
    if isinstance(found, str):
        raise RuntimeError(found)
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        result = getattr(cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed with CUDA error {result}")

    call("cuInit", 0)
    total = 0
    for index, device in enumerate(jax.local_devices()):
        ordinal = index if device.platform == "cpu" else device.local_hardware_id
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        free, all_of_it = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(handle), ordinal)
        # JAX's own, which lives on.
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(all_of_it))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(context))
            call("cuDevicePrimaryCtxRelease_v2", handle)
        total += free.value
    return total


def communicators_bytes() -> int:
    """Returns what the communicators hold on the devices of this process."""
    report = jaxcomm.memory_report()
    # What they were split off is told on the row of each.
    parents = {id(row.communicator.world): row.parent_bytes for row in report}
    return sum(row.device_bytes for row in report) + sum(parents.values())


def left_bytes() -> int:
    """Returns what is free or in JAX's pool: what nobody else took."""
    return free_bytes() + sum(_of_jax("pool_bytes"))


def in_use_by_jax() -> int:
    """Returns what arrays and programs hold, 0 where JAX does not tell."""
    return sum(_of_jax("bytes_in_use"))


def peak_of_jax() -> int:
    """Returns the most that arrays and programs held, 0 where JAX does not tell."""
    return sum(_of_jax("peak_bytes_in_use"))


def _of_jax(name):
    for device in jax.local_devices():
        yield (device.memory_stats() or {}).get(name, 0)
