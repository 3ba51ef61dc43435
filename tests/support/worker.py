"""A process that does what a test tells it: see team.py.

Lines on stdin are Python, as JSON; each is answered on stdout, in a line of JSON, with
what the variable ``answer`` holds afterwards. What the code prints goes where errors
go. It ends with its parent, and when stdin does.
"""

import ctypes
import errno
import faulthandler
import functools
import gc
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

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import waiting  # noqa: E402

import jaxcomm  # noqa: E402

P = jax.P
_speaking = threading.Lock()


def join(count, number, port):
    """Enter jax.distributed, on the loopback interface only."""
    global index
    index = number
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        count,
        index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
    )


def say(message):
    """Tell the parent something, in a line."""
    with _speaking:
        _replies.write(json.dumps(message) + "\n")
        _replies.flush()


def hear():
    """Return the next thing that the parent tells; end with it."""
    line = sys.stdin.readline()
    if not line:
        os._exit(1)
    return json.loads(line)


def call(file, name, at, arguments):
    """Return what a function of a file makes of a Here, a mesh and arguments."""
    # The deadline holds inside C++ too, and when nobody reads the answer any more.
    faulthandler.dump_traceback_later(waiting.HANG_SECONDS, exit=True)
    import here

    try:
        meshes = [] if at is None else [this().mesh(*at)]
        if None in meshes:
            return None
        return getattr(here.load(file), name)(this(), *meshes, **arguments)
    except BaseException:
        # pytest.fail() raises what would end this process.
        raise RuntimeError(traceback.format_exc()) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        # The next call meets nothing of this one.
        jaxcomm.finalize()


@functools.cache
def this():
    import here

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    return here.Here()


def mesh_of(devices=None, axis="i"):
    """Return a mesh over one axis; if None or a number, of that many of all devices."""
    if devices is None or isinstance(devices, int):
        devices = jax.devices()[:devices]
    return jax.sharding.Mesh(
        np.array(devices), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
    )


def of_processes(*processes):
    return [device for device in jax.devices() if device.process_index in processes]


def jitted(call, mesh, axis="i"):
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
    rows = [np.asarray(shard.data) for shard in array.addressable_shards]
    return [float(row.ravel()[0]) for row in rows]


def attempt(action):
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
            say({"raised": f"it never came to what was waited for: {stack}"})
        else:
            say({"answer": "now"})

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


def psum_of_ones(mesh, width=1):
    ones = jitted(lambda x: jaxcomm.psum(x * 0 + 1, "i"), mesh)
    (group,) = set(values(ones(spread(mesh, width))))
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


def main():
    # As in tests/conftest.py: what is here already is no garbage.
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        scope = globals()
        scope["answer"] = None
        try:
            exec(json.loads(line), scope)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error))
            say({"raised": text})
        else:
            say({"answer": scope["answer"]})


if __name__ == "__main__":
    _replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
