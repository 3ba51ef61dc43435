"""Sets of real processes that tests put to work and then stop, break or kill."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import socket
import subprocess
import sys

import forked
import pytest
import waiting

_WORKER = pathlib.Path(__file__).with_name("worker.py")


class Process:
    """One worker: tell it something, hear what it made of it.

    Attributes:
      popen: the process; its stdout and stderr go to the file ``said()`` reads.
    """

    def __init__(self, index, count, port, environment, folder, worker):
        """Start it; :meth:`hear` is not needed before the first :meth:`tell`."""
        self.index = index
        read, write = os.pipe()
        self._log = (folder / f"process-{index}.txt").open("w+b")
        arguments = [sys.executable, worker, index, count, port, write]
        self.popen = forked.Popen(
            list(map(str, arguments)),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(write,),
        )
        os.close(write)
        self._replies = read
        self._heard = b""

    @property
    def pid(self):
        return self.popen.pid

    def tell(self, code):
        """Have it execute Python; :meth:`hear` returns what it assigns to answer."""
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(json.dumps(code).encode() + b"\n")
            self.popen.stdin.flush()

    def hear(self):
        """Return the answer to the oldest question; fail if there is none."""
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._replies], [], [], waiting.HANG_SECONDS)
            if not ready:
                raise AssertionError(
                    f"process {self.index} does not answer; it said: "
                    f"{self.said()[-3000:]}"
                )
            more = os.read(self._replies, 1 << 16)
            if not more:
                raise AssertionError(
                    f"process {self.index} ended with {self.ends()}; it said: "
                    f"{self.said()[-3000:]}"
                )
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        reply = json.loads(line)
        if "raised" in reply:
            raise AssertionError(f"process {self.index}: {reply['raised']}")
        return reply["answer"]

    def ask(self, code):
        self.tell(code)
        return self.hear()

    def send(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.popen.kill()

    def ends(self):
        """Wait until it has ended; return its status."""
        return self.popen.wait(waiting.HANG_SECONDS)

    def said(self):
        """Return what it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def stop(self):
        """End it, whatever it does, and let go of its pipes."""
        self.popen.kill()
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.popen.wait()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1
            self._log.close()


class Set:
    """Processes of one jax.distributed job, by their indices there."""

    def __init__(self, count, folder, *, devices=1, copies=False, **more):
        """Start them all.

        Args:
          count: how many.
          folder: for what they print.
          devices: virtual devices of each.
          copies: whether each runs a file of its own.
          more: environment variables.
        """
        # Keeps the port from others; process 0 can bind it, for gRPC shares ports too.
        self._keeper = socket.socket()
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._keeper.bind(("127.0.0.1", 0))
        port = self._keeper.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy") and not name.startswith("JAXCOMM_")
        } | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
            **more,
        }
        self.processes = []
        for index in range(count):
            worker = _WORKER
            if copies:
                worker = folder / f"folder-of-{index}" / _WORKER.name
                worker.parent.mkdir()
                shutil.copy(_WORKER, worker)
            self.processes.append(
                Process(index, count, port, environment, folder, worker)
            )
        try:
            self.ask("join()")
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, index):
        return self.processes[index]

    def __iter__(self):
        return iter(self.processes)

    def ask(self, code, of=None):
        """Have some of them, or all, execute Python; return their answers in order."""
        some = self.processes if of is None else [self.processes[i] for i in of]
        for process in some:
            process.tell(code)
        return [process.hear() for process in some]

    def stop(self):
        # Process 0 last: jax.distributed ends the others when they lose it.
        for process in reversed(self.processes):
            process.stop()
        self._keeper.close()
        ours = tuple(f"jaxcomm-{process.pid}-" for process in self.processes)
        assert [name for name in os.listdir("/dev/shm") if name.startswith(ours)] == []


@contextlib.contextmanager
def starting(folder):
    sets = []

    def begin(count, **options):
        sets.append(Set(count, folder / f"set-{len(sets)}", **options))
        return sets[-1]

    try:
        yield begin
    finally:
        for one in sets:
            one.stop()


@pytest.fixture
def start(tmp_path):
    """Gives ``start(count, devices=1)``; stops what it has started."""
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory):
    """Does as ``start``, for sets that the tests of a file share."""
    with starting(tmp_path_factory.mktemp("sets")) as begin:
        yield begin
