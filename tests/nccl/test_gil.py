"""Other Python threads run while the extension waits for a device."""

import ctypes
import sys
import threading

import waiting

from jaxcomm import _ffi
from jaxcomm.communicator.backends.nccl import library

_NON_BLOCKING = 1


class BusyDevice:
    """Device 0, which a Python function keeps busy: it needs the GIL to end."""

    def __init__(self, stand_in):
        self._begin, self.has_run = threading.Event(), threading.Event()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        stand_in.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        stand_in.cuCtxPushCurrent_v2(context)
        stand_in.cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, 0)
        stand_in.cuLaunchHostFunc(stream, self._function, None)

    def _run(self, _):
        self._begin.wait()
        self.has_run.set()

    def end_soon(self):
        """Let the function end as soon as the calling thread releases the GIL."""
        self._begin.set()


def test_the_last_reference_to_a_world_waits_without_the_gil(stand_in):
    library.load()
    world = _ffi.nccl_world(
        size=1, devices=[(0, 0, 0)], unique_id=_ffi.nccl_unique_id(), numbers={},
        name="", timeout_seconds=waiting.HANG_SECONDS, peers=[],
    )  # fmt: skip
    device = BusyDevice(stand_in)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(waiting.HANG_SECONDS)
        device.end_soon()
        del world
        assert device.has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
