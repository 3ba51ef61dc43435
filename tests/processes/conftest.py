"""Teams of JAX processes that stay up while many tests run functions in them."""

import inspect
import json
import os
import pathlib
import selectors
import subprocess
import sys

import forked
import pytest
import waiting

from jaxcomm.launch import port

WORKER = pathlib.Path(__file__).with_name("worker.py")
LOOPBACK = "127.0.0.1"
# More than a call gets: a process that hangs ends itself and says where it was.
ANSWER_SECONDS = waiting.HANG_SECONDS + 30
TAIL_BYTES = 6000


class Team:
    """Processes of ``devices`` CPU devices each, joined by jax.distributed."""

    def __init__(self, processes, devices, folder, environment=None):
        self.devices = devices
        self._logs = [folder / f"process-{i}.txt" for i in range(processes)]
        self._popens = []
        self.broken = False
        with port.reserved(0) as number:
            for process, log in enumerate(self._logs):
                words = [process, processes, devices, number]
                with log.open("w") as stderr:
                    popen = forked.Popen(
                        [sys.executable, "-W", "error", WORKER, *map(str, words)],
                        env=_environment(environment or {}),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                    )
                self._popens.append(popen)
            self._replies()

    def call(self, function, *, environment=None, **arguments):
        """Runs ``function(here, **arguments)`` in every process.

        Returns what it returned in each, which must be JSON. The test fails, with what
        all of them have to say, if it raised or hangs in any.
        """
        message = {
            "file": inspect.getfile(function),
            "function": function.__name__,
            "arguments": arguments,
            "environment": environment or {},
        }
        for popen in self._popens:
            popen.stdin.write(json.dumps(message).encode() + b"\n")
            popen.stdin.flush()
        return self._replies()

    def stop(self):
        """Lets the processes end by themselves, and checks that they do so in order."""
        if self.broken:
            return
        for popen in self._popens:
            popen.stdin.close()
        try:
            for popen in self._popens:
                popen.wait(waiting.HANG_SECONDS)
        except subprocess.TimeoutExpired:
            self._fail("they do not end", [None] * len(self._popens))
        finally:
            self._kill()
        statuses = [popen.returncode for popen in self._popens]
        if any(statuses):
            self._fail(f"they ended with {statuses}", [None] * len(self._popens))
        assert not (left := self.shared_files()), f"left in /dev/shm: {left}"

    def shared_files(self):
        """Returns the names in /dev/shm that are of these processes."""
        pids = {str(popen.pid) for popen in self._popens}
        return [n for n in os.listdir("/dev/shm") if pids & set(n.split("-"))]

    def _replies(self):
        replies = [None] * len(self._popens)
        seconds = ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for process, popen in enumerate(self._popens):
                selector.register(popen.stdout, selectors.EVENT_READ, process)
            while selector.get_map():
                ready = selector.select(seconds)
                if not ready:
                    self._fail("no answer", replies)
                for key, _ in ready:
                    line = key.fileobj.readline()
                    selector.unregister(key.fileobj)
                    replies[key.data] = json.loads(line) if line else {}
                if any("value" not in reply for reply in replies if reply is not None):
                    # The others may wait for it: they get a moment to say so.
                    seconds = waiting.EXPIRES_SECONDS
        if any("value" not in reply for reply in replies):
            self._fail("an error", replies)
        return [reply["value"] for reply in replies]

    def _fail(self, what, replies):
        self.broken = True
        self._kill()
        text = [f"a team of {len(self._popens)} x {self.devices} devices: {what}"]
        for process, (popen, log, reply) in enumerate(
            zip(self._popens, self._logs, replies, strict=True)
        ):
            said = log.read_text(errors="replace")[-TAIL_BYTES:]
            error = (reply or {}).get("error", "")
            state = "no answer" if reply is None else "answered" if reply else "ended"
            text.append(
                f"--- process {process} ({state}, status {popen.returncode}):\n"
                f"{said}{error}"
            )
        pytest.fail("\n".join(text), pytrace=False)

    def _kill(self):
        for popen in self._popens:
            if popen.poll() is None:
                popen.kill()
        for popen in self._popens:
            popen.wait()
            popen.stdout.close()
            popen.stdin.close()


def _environment(more):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA_"))
    }
    if any("_proxy" in name.lower() for name in inherited):
        # gRPC would ask a proxy for the way to this host.
        inherited["no_grpc_proxy"] = LOOPBACK
    ours = {"JAXCOMM_TIMEOUT": "120", "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]}
    return inherited | ours | more


@pytest.fixture(scope="session")
def _teams():
    running = []
    yield running
    for team in running:
        team.stop()


@pytest.fixture
def team(_teams, tmp_path_factory):
    """Four processes of two devices each, kept for the tests that follow.

    Meshes take as many of them as they need.
    """
    if not _teams or _teams[-1].broken:
        _teams[:] = [Team(4, 2, tmp_path_factory.mktemp("team"))]
    return _teams[-1]
