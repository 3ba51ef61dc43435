"""``subprocess.Popen`` and ``run`` for tests whose processes all import jax first.

That import is most of what such a process costs. So it is forked from one that has
imported jax: see fork_server.py. It is a child of this process, as any other. If it
cannot be had by forking, an ordinary process is started. Tests of the start, of the
import and of the end start ordinary processes.
"""

import atexit
import ctypes
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

_SERVER = pathlib.Path(__file__).with_name("fork_server.py")
_PR_SET_CHILD_SUBREAPER = 36

# Read when jax is imported, and settled in its configuration until it has devices.
_CONFIG = {
    "JAX_ENABLE_RECOVERABILITY": lambda text: bool(int(text)),
    "JAX_ENABLE_PREEMPTION_SERVICE": lambda text: bool(int(text)),
    "JAX_PLATFORMS": str,
    "JAX_NUM_CPU_DEVICES": int,
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
}
# Read later: by jaxcomm, by the stand-in for NCCL, by XLA when it first compiles.
_READ_LATER = ("JAXCOMM_", "NCCL_", "XLA_FLAGS", "QUICK_XLA_FLAGS", "TMPDIR", "PYTEST_")
# Options of ``subprocess.Popen`` beyond descriptors, variables and folder.
_NO_MORE = (True, None, None, None, -1, False, -1)


class _Server:
    """The process that forks, and what it was started with."""

    def __init__(self, options):
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", *_READ_LATER))
        }
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._channel, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with other:
            self._popen = subprocess.Popen(
                [sys.executable, *options, _SERVER, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                # A thread of OpenBLAS would not survive a fork.
                env=self.environment | {"OPENBLAS_NUM_THREADS": "1"},
            )
        atexit.register(self.stop)

    def fork(self, request, descriptors):
        """Returns the id of a child that does what is requested."""
        with self._lock:
            # It is an orphan for a moment: so it becomes this process's.
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                message = json.dumps(request).encode()
                socket.send_fds(self._channel, [message], descriptors)
                answer = self._channel.recv(100)
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the fork server ended: {self._popen.poll()}"
        return int(answer)

    def stop(self):
        self._channel.close()
        self._popen.wait()


# By the options of Python.
_servers: dict[tuple[str, ...], _Server] = {}


def _request(args, cwd, environment):
    """Returns a server, and what it is to do; None if that needs an ordinary start."""
    if "COVERAGE_PROCESS_START" in environment or sys.platform != "linux":
        return None
    words = [os.fspath(arg) for arg in args]
    if words.pop(0) != sys.executable:
        return None
    options = ()
    if words[:2] == ["-W", "error"]:
        options, words = ("-W", "error"), words[2:]
    kind = words.pop(0) if words[0] in ("-c", "-m") else "script"
    if words[0].startswith("-"):
        return None
    server = _servers.get(options) or _servers.setdefault(options, _Server(options))
    changed = {
        name
        for name in environment.keys() | server.environment.keys()
        if environment.get(name) != server.environment.get(name)
        and not name.startswith(_READ_LATER)
        and not name.lower().endswith("_proxy")
    }
    if not changed <= _CONFIG.keys():
        return None
    return server, {
        "kind": kind,
        "what": words[0],
        "arguments": words[1:],
        "cwd": None if cwd is None else os.fspath(cwd),
        "environment": dict(environment),
        "config": {name.lower(): _CONFIG[name](environment[name]) for name in changed},
    }


class Popen(subprocess.Popen):
    """As ``subprocess.Popen``, forked if it can be."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ):
        _, _, shell, *pipes = rest[:9]
        found = None
        if not (executable or preexec_fn or shell) and rest[9:] == _NO_MORE:
            found = _request(args, cwd, os.environ if env is None else env)
        if found is None:
            super()._execute_child(  # pyright: ignore[reportAttributeAccessIssue]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        server, request = found
        request["descriptors"] = [0, 1, 2, *pass_fds]
        theirs = pipes[0], pipes[3], pipes[5]
        given = [i if each == -1 else each for i, each in enumerate(theirs)]
        try:
            self.pid = server.fork(request, [*given, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]


def run(arguments, *, capture_output=False, timeout=None, check=False, **options):
    """As ``subprocess.run``, forked if it can be."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(arguments, **options) as popen:
        try:
            out, err = popen.communicate(timeout=timeout)
        except BaseException:
            popen.kill()
            raise
    done = subprocess.CompletedProcess(arguments, popen.returncode, out, err)
    if check:
        done.check_returncode()
    return done
