"""What processes of this machine may do with each other, tried out.

A child does to this process what one rank's process does to another's. The other way
round would tell little: systems that forbid it (Yama, seccomp) let a parent do more to
its children than strangers may do to each other.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from jaxcomm.doctor import attempts
from jaxcomm.doctor.rows import Row

_WORD = b"jaxcomm doctor"
_SECONDS = 30


def sharing() -> Iterator[Row]:
    """Yields whether memory, descriptors and deaths of processes can be seen."""
    try:
        found = _try()
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        yield Row("attempts", f"could not be made: {error}", is_fine=False)
        return
    yield _row(
        "memfd through /proc/<pid>/fd",
        found["memory"],
        "works: processes can share memory without /dev/shm",
        "processes fall back to files in /dev/shm",
    )
    yield _row(
        "pidfd_open",
        found["pidfd"],
        "works: the death of a process is noticed at once",
        "the death of a process is noticed late; it needs Linux 5.3",
    )
    yield _row(
        "process_vm_readv",
        found["read"],
        "allowed",
        "bytes travel through shared memory only",
        essential=False,
    )
    scope = "/proc/sys/kernel/yama/ptrace_scope"
    if os.path.exists(scope):
        with open(scope) as file:
            yield Row("yama ptrace_scope", file.read().strip())


def _row(name, problem, good, bad, essential=True):
    if problem is None:
        return Row(name, good, {"works": True}, True)
    return Row(
        name,
        f"refused ({problem}): {bad}",
        {"works": False, "reason": problem},
        False if essential else None,
    )


def _try():
    word = ctypes.create_string_buffer(_WORD, len(_WORD))
    file = os.memfd_create("jaxcomm-doctor")
    try:
        os.write(file, _WORD)
        arguments = (os.getpid(), file, ctypes.addressof(word), len(_WORD))
        done = subprocess.run(
            [sys.executable, "-I", attempts.__file__, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
        if found["memory"] is None and os.pread(file, 64, 0) != _WORD[::-1]:
            found["memory"] = "what another process writes is not seen"
    finally:
        os.close(file)
    return found
