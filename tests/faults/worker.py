"""A process of a set that does what a test tells it: ``worker.py INDEX COUNT PORT``.

Lines on stdin are Python, as JSON; each is answered on a pipe of its own with what the
variable ``answer`` holds afterwards. It ends with its parent, and when stdin does.
"""

import ctypes
import errno
import json
import os
import signal
import struct
import sys
import threading
import traceback

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

index, count, port, replies = map(int, sys.argv[1:5])
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import waiting  # noqa: E402

import jaxcomm  # noqa: E402

P = jax.P


def join(**options):
    """Enter jax.distributed, on the loopback interface only."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, count, index, coordinator_bind_address=address, **options
    )


def mesh_of(devices=None, axis="i"):
    """Return a mesh over one axis; if None, of all devices of all processes."""
    devices = jax.devices() if devices is None else devices
    return jax.sharding.Mesh(
        np.array(devices), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
    )


def of_processes(*processes):
    """Return the devices of some processes."""
    return [device for device in jax.devices() if device.process_index in processes]


def jitted(call, mesh, axis="i"):
    """Return a program of one call, split and joined over the mesh."""
    return jax.jit(
        jax.shard_map(
            call, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False
        )
    )


def spread(mesh, width=1, dtype=np.float32, axis="i"):
    """Return an array with row k, full of k, on rank k."""
    size = mesh.devices.size
    rows = np.arange(size).astype(dtype)[:, None]
    return jax.make_array_from_callback(
        (size, width),
        jax.NamedSharding(mesh, P(axis)),
        lambda where: np.ascontiguousarray(np.broadcast_to(rows, (size, width))[where]),
    )


def values(array):
    """Return the first number of each of this process's rows."""
    rows = [np.asarray(shard.data) for shard in array.addressable_shards]
    return [float(row.ravel()[0]) for row in rows]


def attempt(action):
    """Return what an action returned or raised."""
    try:
        return {"value": action()}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def begin(action):
    """Start ``attempt(action)`` beside the main thread; return once a rank waits."""
    global _begun
    told = []
    thread = threading.Thread(target=lambda: told.append(attempt(action)), daemon=True)
    _begun = thread, told
    thread.start()
    waiting.until(lambda: has_begun() or not thread.is_alive())


def outcome():
    """Return what became of the action begun last."""
    thread, told = _begun
    waiting.joined(thread)
    return told[0]


def say_when(condition):
    """Send an answer of its own as soon as ``condition()`` is true."""

    def watch():
        try:
            waiting.until(condition)
        except AssertionError:
            frame = sys._current_frames()[threading.main_thread().ident]
            stack = "".join(traceback.format_stack(frame))
            reply({"raised": f"it never came to what was waited for: {stack}"})
        else:
            reply({"answer": "now"})

    threading.Thread(target=watch, daemon=True).start()


def is_in(name, **variables):
    """Return whether the main thread is in a function, with values of variables."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        # From Python 3.13 on f_locals is no dict, and its items are no set.
        found = dict(frame.f_locals).items()
        if frame.f_code.co_name == name and variables.items() <= found:
            return True
        frame = frame.f_back
    return False


def forbid(*calls):
    """Make system calls fail in this thread and those it starts, as a sandbox may."""
    number = {
        "memfd_create": {"x86_64": 319, "aarch64": 279}[os.uname().machine],
        "pidfd_open": 434,
    }
    load_number, jump_if_equal, give_back = 0x20, 0x15, 0x06
    fail, allow = 0x00050000 | errno.ENOSYS, 0x7FFF0000
    for call in calls:
        code = b"".join(
            struct.pack("HBBI", *instruction)
            for instruction in (
                (load_number, 0, 0, 0),
                (jump_if_equal, 0, 1, number[call]),
                (give_back, 0, 0, fail),
                (give_back, 0, 0, allow),
            )
        )
        held = ctypes.create_string_buffer(code)
        program = struct.pack("HxxxxxxP", 4, ctypes.addressof(held))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program):
            raise OSError(ctypes.get_errno(), f"cannot forbid {call}")


def resources():
    """Return what a leak would show in: resident bytes, open files, threads."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (
        resident,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def psum_of_ones(mesh, width=1):
    """Return the size of the mesh, if all is well."""
    (group,) = {
        float(value)
        for value in values(
            jitted(lambda x: jaxcomm.psum(x * 0 + 1, mesh.axis_names[0]), mesh)(
                spread(mesh, width)
            )
        )
    }
    return group


def in_flight():
    """Return how many collectives some rank of this process waits in."""
    return sum(member.stats()["in_flight"] for member in jaxcomm.communicators())


def has_begun():
    """Return whether a rank of this process is in a collective.

    What a handler itself is moving is in the flight record alone.
    """
    return in_flight() > 0 or any(
        entry.state == "started"
        for record in jaxcomm.flight_record().process.communicators
        for entry in record.entries
    )


def reply(message):
    out.write(json.dumps(message) + "\n")
    out.flush()


def main():
    for line in sys.stdin:
        scope = globals()
        scope["answer"] = None
        try:
            exec(json.loads(line), scope)
        except Exception as error:
            reply({"raised": f"{type(error).__name__}: {error}"})
        else:
            reply({"answer": scope["answer"]})


if __name__ == "__main__":
    with os.fdopen(replies, "w") as out:
        main()
