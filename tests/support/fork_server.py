"""A Python that has imported jax, and forks for each process that a test starts.

:mod:`forked` starts it, and asks on a socket. It has no other thread, no device and no
jaxcomm. So what is forked from it can have them all. There jax counts as imported once
the program imports it, and reads its variables then.
"""

import fcntl
import gc
import importlib.abc
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import types

import jax

# What jaxcomm imports beside jax. Not jaxcomm: it reads variables as it is imported.
import jax.experimental.pallas

_MOST_DESCRIPTORS = 16
# Above all numbers that a test asks for.
_OUT_OF_THE_WAY = 500


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds jax, which was imported before, when the program imports it."""

    def __init__(self):
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] == "jax"
        }
        self._spec = jax.__spec__

    def hide(self):
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != "jax":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return self._modules["jax"]

    def exec_module(self, module):
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        for name, text in os.environ.items():
            _settle(module.config, name.lower(), text)


def _settle(config, name, text):
    """Have an option that jax would have read from its variable."""
    if name.startswith("jax_") and hasattr(config, name):
        default = getattr(config, name)
        if isinstance(default, bool):
            config.update(name, text.lower() in ("1", "true", "yes", "on", "y", "t"))
        else:
            kind = type(default) if isinstance(default, int | float) else str
            config.update(name, kind(text))


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
    """Take the descriptors, variables, session and folder asked for."""
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
    if request["session"]:
        os.setsid()
    if request["unbuffered"]:
        sys.stdout, sys.stderr = map(_unbuffered, (sys.stdout, sys.stderr))
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _unbuffered(stream):
    return io.TextIOWrapper(
        io.FileIO(stream.fileno(), "w", closefd=False),
        stream.encoding,
        stream.errors,
        write_through=True,
    )


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


def main(channel) -> None:
    """Serve; in a new process do what was asked for, and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose some"
    gc.collect()
    gc.freeze()
    asked = serve(channel)
    if asked is not None:
        _run(asked["kind"], asked["what"], asked["arguments"])


def begin(number) -> None:
    """Serve on the socket of a number."""
    _Hidden().hide()
    main(socket.socket(fileno=number))
