"""A Python that has imported jax, and forks for each process that a test starts.

``fork_server.py CHANNEL``: the number of a socket on which :mod:`forked` asks. It has
no other thread, no device and no jaxcomm. So what is forked from it can have them all.
"""

import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import types

import jax

# What jaxcomm imports beside jax. Not jaxcomm: where it was forked, it refuses to work.
import jax.experimental.pallas

_MOST_DESCRIPTORS = 16
# Above all numbers that a test asks for.
_OUT_OF_THE_WAY = 500


def _fork_orphan() -> tuple[int, int]:
    """Fork, such that whoever reaps orphans becomes the parent.

    Returns:
      In the new process 0 and a pipe that ends once it has that parent. Here its id and
      the other end of the pipe.
    """
    waits, ends = os.pipe()
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            for each in (ends, told, tell):
                os.close(each)
            return 0, waits
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 100))
    for each in (waits, told, tell):
        os.close(each)
    return pid, ends


def _become(request, descriptors, waits) -> None:
    """Take the descriptors, variables, configuration and folder asked for."""
    os.read(waits, 1)
    os.close(waits)
    numbers = request["descriptors"]
    aside = [fcntl.fcntl(d, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for d in descriptors]
    for each in descriptors:
        os.close(each)
    for number, each in zip(numbers, aside, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, value in request["config"].items():
        jax.config.update(name, value)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(kind, what, arguments) -> None:
    """Do what ``python`` does with a script, ``-c`` or ``-m``."""
    sys.argv = [what if kind == "script" else kind, *arguments]
    if not sys.flags.safe_path:
        folders = {"-c": "", "-m": os.getcwd(), "script": os.path.dirname(what)}
        sys.path[0] = folders[kind]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    source, name = what, "<string>"
    if kind == "script":
        name = main.__file__ = what
        with open(what, "rb") as file:
            source = file.read()
    exec(compile(source, name, "exec"), main.__dict__)


def serve(channel) -> dict | None:
    """Fork for each request; return it in the new process, None where no more come."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(
            channel, 1 << 20, _MOST_DESCRIPTORS
        )
        if not message:
            return None
        request = json.loads(message)
        pid, pipe = _fork_orphan()
        if pid == 0:
            channel.close()
            _become(request, descriptors, pipe)
            return request
        for each in (pipe, *descriptors):
            os.close(each)
        channel.send(str(pid).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose some"
    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _run(asked["kind"], asked["what"], asked["arguments"])
