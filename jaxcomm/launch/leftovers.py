"""What killed processes leave behind: others of their sessions, and shared memory."""

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Collection, Iterator

# A killed process frees its memory first, that of GPUs included.
_SECONDS = 10.0
_SHARED_MEMORY = pathlib.Path("/dev/shm")


def end(sessions: Collection[int]) -> None:
    """Kill and wait for what is left of sessions, and delete their shared memory.

    Args:
      sessions: process ids of their leaders, which have ended.
    """
    until = time.monotonic() + _SECONDS
    while members := [pid for pid, of in _running() if of in sessions]:
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            print(
                f"jaxcomm.launch: still running {_SECONDS:g} s after SIGKILL: "
                f"{', '.join(map(str, members))}",
                file=sys.stderr,
                flush=True,
            )
            break
        time.sleep(0.01)
    # A process that is killed between making and unlinking it, see segment.cc.
    for pid in sessions:
        for path in _SHARED_MEMORY.glob(f"jaxcomm-{pid}-*"):
            # Another user's process may have had the same number.
            with contextlib.suppress(OSError):
                path.unlink()


def _running() -> Iterator[tuple[int, int]]:
    """Yield process id and session of all processes that have not ended."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may have spaces.
            words = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if words[0] not in "ZX":
            yield int(path.parent.name), int(words[3])
