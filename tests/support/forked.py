"""``subprocess.Popen`` and ``run`` for tests whose processes all import jax first.

That import is most of what such a process costs. So it is forked from one that has
imported jax: see fork_server.py. It is a child of this process, as any other. If it
cannot be had by forking, an ordinary process is started. Tests of the start, of the
import and of the end start ordinary processes.

``LAUNCH`` in place of ``-m jaxcomm.launch``: what the launcher starts is forked, too.
"""

import atexit
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading

_PR_SET_CHILD_SUBREAPER = 36
LAUNCH = ("-m", "forked_launch")
_Ordinary = subprocess.Popen

# Read later: by jax, which counts as imported once the program imports it, by jaxcomm,
# by the stand-in for NCCL, by XLA when it first compiles.
_READ_LATER = "JAX_", "JAXCOMM_", "NCCL_", "XLA_FLAGS", "QUICK_XLA_FLAGS", "TMPDIR"
_READ_LATER += ("PYTEST_",)
# Options of Python that a variable gives the server, too.
_SAID_BY = {"-B": "PYTHONDONTWRITEBYTECODE", "-P": "PYTHONSAFEPATH"}
# Options of ``subprocess.Popen`` beyond descriptors, variables, folder and session.
_NO_MORE = (True, None, None, None, -1, -1)


class _Server:
    """The process that forks, and what it was started with.

    Args:
      start: gets our end of a channel, that of the process, and its variables. Returns
        what waits for its end.
    """

    def __init__(self, start):
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_READ_LATER)
        }
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._channel, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with other:
            self._wait = start(self._channel, other, self.environment)
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
        assert answer, f"the fork server ended: {self._wait()}"
        return int(answer)

    def stop(self):
        self._channel.close()
        self._wait()


def _start(options, ours, channel, environment):
    serve = f"import fork_server; fork_server.begin({channel.fileno()})"
    process = _Ordinary(
        [sys.executable, *options, "-c", serve],
        stdin=subprocess.DEVNULL,
        pass_fds=(channel.fileno(),),
        # A thread of OpenBLAS would not survive a fork.
        env=environment | {"OPENBLAS_NUM_THREADS": "1"},
    )
    return process.wait


# By the options of Python.
_servers: dict[tuple[str, ...], _Server] = {}


def serve_from(start):
    """Have what this process starts be forked by one that was forked from itself."""
    _servers[()] = _Server(start)


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
    while environment.get(_SAID_BY.get(words[0], "")):
        words.pop(0)
    if is_unbuffered := words[0] == "-u":
        words.pop(0)
    kind = words.pop(0) if words[0] in ("-c", "-m") else "script"
    if words[0].startswith("-"):
        return None
    server = _servers.get(options) or _servers.setdefault(
        options, _Server(functools.partial(_start, options))
    )
    changed = {
        name
        for name in environment.keys() | server.environment.keys()
        if environment.get(name) != server.environment.get(name)
        and not name.startswith(_READ_LATER)
        and not name.lower().endswith("_proxy")
    }
    if changed:
        return None
    return server, {
        "kind": kind,
        "what": words[0],
        "arguments": words[1:],
        "cwd": None if cwd is None else os.fspath(cwd),
        "environment": dict(environment),
        "unbuffered": is_unbuffered,
    }


class Popen(subprocess.Popen):
    """As ``subprocess.Popen``, forked if it can be."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ):
        _, _, shell, *pipes = rest[:9]
        found = None
        *others, starts_session, group = rest[9:]
        if not (executable or preexec_fn or shell) and (*others, group) == _NO_MORE:
            found = _request(args, cwd, os.environ if env is None else env)
        if found is None:
            super()._execute_child(  # pyright: ignore[reportAttributeAccessIssue]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        server, request = found
        request["descriptors"] = [0, 1, 2, *pass_fds]
        request["session"] = starts_session
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
