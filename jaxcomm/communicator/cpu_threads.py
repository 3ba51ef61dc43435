"""Threads for XLA's CPU client, of which it makes too few for a mesh of many devices.

A launch takes one thread of the client's pool for each device. The thread is held until
the program of that device ends, also while the program waits for other ranks. Up to
jaxlib 0.11 the same pool begins the launches. Each device has room for 32 launches; a
thread that begins one more waits until the oldest ends. The pool has a thread for each
core, or for each device if those are more. A loop that reads nothing for some steps
fills the pool with launches that wait, and the programs they wait for find no thread.

Seen with a debugger on 0.10.2, where 8 devices have 8 threads: 6 waited for a program
(``CpuPjRtRawLoadedExecutable::Execute``, ``BlockUntilReady``) and 2 for room
(``ExecuteLaunch``, ``Semaphore::Acquire``). From 0.12 on launches and programs have
pools of their own.

The client reads the number of threads from PJRT_NPROC, else NPROC, when it is made.
"""

import contextlib
import os
import re
import threading

import jax
import jaxlib.version

from jaxcomm import compat
from jaxcomm._built import ABSENCE, _ffi

# Multi-device launches run one at a time, with one thread for each device. Every Python
# thread that launches can block as many more: measured on 0.10.2, k Python threads need
# (k + 1) threads for each device, and hang with one thread less. One Python thread is
# covered: more threads than cores have a price. With 16 for 8 devices of two cores a
# scan of sums and products took about 15 % longer than with 8 (jax.lax too), a chain of
# 50 small sums 3 to 15 %: to launch any program took 0.22 ms in place of 0.13. With 32
# the scan took 20 to 45 % longer. A thread that sleeps costs 90 kB.
THREADS_PER_DEVICE = 2

_SHARES_ONE_POOL = jaxlib.version.__version_info__[:2] < (0, 12)
_VARIABLE = "PJRT_NPROC"

# Threads of the client that was made last, None if it was made before the import.
_threads: int | None = None
# Python threads that have compiled programs with collectives.
_launchers: set[int] = set()


def prepare() -> None:
    """Give the CPU client enough threads, if JAX has still to make it."""
    if _SHARES_ONE_POOL:
        compat.make_cpu_client_inside(_enough_threads)


def wanted(devices: int) -> int:
    """Return how many threads a client of so many devices needs."""
    # One device is launched from the Python thread itself, which then waits there.
    return THREADS_PER_DEVICE * devices if devices > 1 else 1


def shortage() -> str:
    """Return why ranks of this process may find no thread, and what to do.

    Returns:
      Sentences for a message; ``""`` if there are enough threads.
    """
    if not _SHARES_ONE_POOL:
        return ""
    devices = jax.local_device_count("cpu")
    threads = max(_by_environment(), devices) if _threads is None else _threads
    enough = wanted(devices)
    if threads >= enough:
        return ""
    remedy = (
        f"Set PJRT_NPROC={enough} or more, or unset it"
        if os.environ.get(_VARIABLE)
        else f"Import jaxcomm before JAX's first use of a device, or start the process "
        f"with PJRT_NPROC={enough}"
    )
    return (
        f"XLA's CPU client has {threads} threads for {devices} devices. Launches that "
        f"wait for earlier ones may hold all of them, and leave none to the missing "
        f"ranks. {remedy}."
    )


def note_launcher() -> None:
    """Note that this Python thread compiles a program, and so launches some.

    From the second such thread on, errors say how many threads would do.
    """
    thread = threading.get_ident()
    if thread in _launchers or not _SHARES_ONE_POOL or ABSENCE:
        return
    _launchers.add(thread)
    with contextlib.suppress(*compat.NO_DEVICES):
        devices = jax.local_device_count("cpu")
        if devices > 1 and len(_launchers) > 1:
            _ffi.set_hint_if_late(_for_several_launchers(devices))


def _for_several_launchers(devices: int) -> str:
    """Return how many threads would do if several Python threads launch programs."""
    threads = max(_by_environment(), devices) if _threads is None else _threads
    return (
        f"XLA's CPU client has {threads} threads for {devices} devices. If k Python "
        f"threads launch programs at a time, that is enough for k up to "
        f"{threads // devices - 1}. Start the process with PJRT_NPROC=(k + 1) * "
        f"{devices}."
    )


@contextlib.contextmanager
def _enough_threads():
    """Make the client inside; what the user set in PJRT_NPROC stays."""
    global _threads
    devices = _requested_devices()
    threads = max(_by_environment(), devices)
    is_ours = not os.environ.get(_VARIABLE) and threads < wanted(devices)
    if is_ours:
        threads = wanted(devices)
        os.environ[_VARIABLE] = str(threads)
    try:
        yield
        _threads = threads
    finally:
        # The client has read it. Processes that this one starts are not to.
        if is_ours:
            os.environ.pop(_VARIABLE, None)


def _requested_devices() -> int:
    """Return how many CPU devices a client that is made now will have here."""
    configured = compat.configured_cpu_devices()
    if configured is not None:
        return configured
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("-"):
        # XLA takes it for the name of a file that holds the flags.
        with contextlib.suppress(OSError), open(flags) as file:
            flags = file.read()
    # Of several the last one holds.
    found = re.findall(r"--xla_force_host_platform_device_count=[\"']?(\d+)", flags)
    return int(found[-1]) if found else 1


def _by_environment() -> int:
    """Return the number of threads that XLA chooses before it looks at devices."""
    for name in (_VARIABLE, "NPROC"):
        with contextlib.suppress(ValueError):
            return max(0, int(os.environ.get(name, "")))
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
