"""The controls of the stand-in for NCCL: see tests/doubles/nccl/controls.h."""

import ctypes
import json
import os

import waiting


class StandIn:
    """The file that JAXCOMM_NCCL_LIBRARY names, which the backend opens too."""

    def __init__(self):
        self._library = ctypes.CDLL(os.environ["JAXCOMM_NCCL_LIBRARY"])
        self._library.jaxcommFakeTrace.restype = ctypes.c_char_p
        self._library.jaxcommFakeMisuse.restype = ctypes.c_char_p
        self._library.jaxcommFakeAsyncError.argtypes = ctypes.c_int64, ctypes.c_int

    def trace(self, *names):
        lines = self._library.jaxcommFakeTrace().decode().splitlines()
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if not names or call["name"] in names]

    def misuse(self):
        return self._library.jaxcommFakeMisuse().decode()

    def until_called(self, function, count):
        waiting.until(lambda: len(self.trace(function)) >= count, function)

    def clear(self):
        self._library.jaxcommFakeClearTrace()

    def fail(self, function, result, after=0):
        self._library.jaxcommFakeFail(function.encode(), after, result)

    def forget_faults(self):
        self._library.jaxcommFakeForgetFaults()

    def hang(self, function, after=0):
        """Has what the next call starts, or one after it, not complete."""
        self._library.jaxcommFakeHang(function.encode(), after)

    def connect(self, function, after=0):
        """Has the next call, or one after it, not return, as NCCL's first use may."""
        self._library.jaxcommFakeConnect(function.encode(), after)

    def async_error(self, call, result=6):
        """Gives the communicator of a call an asynchronous error."""
        assert self._library.jaxcommFakeAsyncError(call["comm"], result) == 1

    def __getattr__(self, name):
        """Returns an exported function: one of CUDA's or NCCL's."""
        return getattr(self._library, name)
