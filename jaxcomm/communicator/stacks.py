"""A thread that writes what all Python threads do, for the flight record.

The extension asks for it on SIGUSR1. A thread of Python can wait for the interpreter's
lock, and then nobody changes what it reads. :mod:`faulthandler` reads no source file,
so a file system that hangs does not hold it up.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import sys
import tempfile
import threading

from jaxcomm._built import _ffi
from jaxcomm.communicator import forks

# The launcher does not count its time as work of the program.
_NAME = b"jaxcomm-stacks"
_PR_SET_NAME = 15

_lock = threading.Lock()
_serves = False


def serve() -> None:
    """Start the thread, once."""
    global _serves
    with _lock:
        if _serves:
            return
        _serves = True
        asks, request = os.pipe()
        answer, answers = os.pipe()
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
        threading.Thread(
            target=_write, args=(asks, answers, file), name=_NAME.decode(), daemon=True
        ).start()
        _ffi.use_stack_server(request, answer, file)


def _write(asks: int, answers: int, file: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    while os.read(asks, 1):
        faulthandler.dump_traceback(file, all_threads=True)
        os.write(answers, b".")


def _leave_to_parent() -> None:
    global _lock, _serves
    _lock, _serves = threading.Lock(), False


forks.in_child(_leave_to_parent)
