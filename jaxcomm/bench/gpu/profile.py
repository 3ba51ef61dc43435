"""What calls ask of the CUDA driver, as JAX's profiler sees it."""

import collections
import ctypes
import pathlib
import tempfile

import jax

from jaxcomm.bench.gpu.rows import Finding
from jaxcomm.bench.gpu.timer import Timer

_CALLS = 20
# Of names of driver calls: what allocates, and what waits on the host.
_FORBIDDEN = "MemAlloc", "MemFree", "MemHostAlloc", "MemCreate", "Synchronize"


def finding(timer: Timer, programs, x) -> Finding:
    """Returns which driver calls that allocate or wait the profiler saw.

    An allocation and a wait of our own, which it must see, come first: where it does
    not, it says nothing of those of the programs.

    Args:
      timer: whose devices they run on.
      programs: warm ones, by name.
      x: their operand.
    """

    def run():
        for program in programs.values():
            for _ in range(_CALLS):
                out = program(x)
            jax.block_until_ready(out)

    name = (
        f"driver calls that allocate or wait, in {_CALLS} calls of each of "
        f"{len(programs)} collectives"
    )
    seen = {word for called in _driver_calls(_control) for word in _words(called)}
    if not {"MemAlloc", "Synchronize"} <= seen:
        return timer.finding(name, "not known: the profiler does not show such calls")
    found = {
        called: count for called, count in _driver_calls(run).items() if _words(called)
    }
    return timer.finding(name, str(found or "none"), not found)


def _words(called):
    return [word for word in _FORBIDDEN if word in called]


def _control():
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))
    cuda.cuMemFree_v2(memory)
    cuda.cuStreamSynchronize(None)
    cuda.cuCtxSynchronize()
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(0)


def _driver_calls(run) -> collections.Counter:
    """Returns how often each call of the driver is in a profile of ``run()``."""
    with tempfile.TemporaryDirectory(prefix="jaxcomm-profile-") as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return collections.Counter(
        event.name
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("cu")
    )
