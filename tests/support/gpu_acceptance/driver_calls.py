"""What calls ask of the CUDA driver, as CUPTI tells it."""

import collections
import contextlib
import ctypes
import importlib.util
import pathlib

import jax

from bench.gpu.rows import Finding
from bench.gpu.timer import Timer

_CALLS = 20
# In names of functions of the driver: what allocates, and what waits on the host.
_COUNTED = "MemAlloc", "MemFree", "MemHostAlloc", "MemCreate", "Synchronize"
# What _control() calls of them.
_CONTROLS = "cuMemAlloc_v2", "cuMemFree_v2", "cuStreamSynchronize"
# Of CUPTI's headers.
_DRIVER_API = 1
_ENTER = 0
_MOST_FUNCTIONS = 2000
_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int)
)


def finding(timer: Timer, programs, x) -> Finding:
    """Returns which functions that allocate or wait are called in calls of programs.

    An allocation and a wait of our own, which must be seen, come first: where they are
    not, nothing is known of those of the programs.

    Args:
      timer: whose devices they run on.
      programs: warm ones, by name.
      x: their operand.
    """

    def run():
        for program in programs.values():
            jax.block_until_ready([program(x) for _ in range(_CALLS)])

    name = (
        f"driver calls that allocate or wait, in {_CALLS} calls of each of "
        f"{len(programs)} collectives"
    )
    try:
        control = counts(_control)
        if sum(control.values()) < len(_CONTROLS):
            raise OSError(f"of {_CONTROLS} CUPTI tells {dict(control)}")
        found = counts(run)
    except OSError as error:
        return timer.finding(name, f"not known: {error}")
    return timer.finding(name, str(dict(found) or "none"), not found)


def counts(run) -> collections.Counter:
    """Returns how often functions that allocate or wait are called during ``run()``.

    Raises:
      OSError: CUPTI cannot be found, or refuses.
    """
    cupti = ctypes.CDLL(_library())
    names: dict[int, str] = {}
    called: collections.Counter = collections.Counter()

    @_CALLBACK
    def note(_, domain, function, site):
        if site[0] == _ENTER:
            called[names[function]] += 1

    def call(name, *arguments):
        result = getattr(cupti, name)(*arguments)
        if result != 0:
            raise OSError(f"{name} failed with CUPTI error {result}")

    subscriber = ctypes.c_void_p()
    call("cuptiSubscribe", ctypes.byref(subscriber), note, None)
    with contextlib.ExitStack() as stack:
        stack.callback(cupti.cuptiUnsubscribe, subscriber)
        name = ctypes.c_char_p()
        for function in range(1, _MOST_FUNCTIONS):
            if cupti.cuptiGetCallbackName(
                _DRIVER_API, ctypes.c_uint32(function), ctypes.byref(name)
            ):
                continue
            text = (name.value or b"").decode()
            if not any(word in text for word in _COUNTED):
                continue
            names[function] = text
            call(
                "cuptiEnableCallback", ctypes.c_uint32(1), subscriber, _DRIVER_API,
                ctypes.c_uint32(function),
            )  # fmt: skip
        run()
    return called


def _library() -> str:
    """Returns the path of the CUPTI that XLA has loaded, or would."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    loaded = (line.split()[-1] for line in maps if "/libcupti.so" in line)
    path = next(loaded, None)
    if path is not None:
        return path
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for found in pathlib.Path(folder).rglob("libcupti.so.*"):
            return str(found)
    return "libcupti.so"


def _control():
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))
    cuda.cuMemFree_v2(memory)
    cuda.cuStreamSynchronize(None)
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(0)
