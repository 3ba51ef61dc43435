"""Processes of one ``jax.distributed`` job that measure when they are asked to."""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TextIO

_WORKER = "bench.processes_worker"
# Eight processes on two cores need most of a minute to import jax and meet.
_START_SECONDS = 180.0
# Above the deadline of the workers, who say where they hang before they end.
_ANSWER_SECONDS = 100.0
# jax's farewell waits long for those who are gone.
_PATIENCE_WITH_FAILED = 1.0
# Of mpiexec after SIGTERM, which it passes on.
_MPIEXEC_SECONDS = 2.0
_LAST_LINES = 6
_MOST_OUTPUT = 1 << 24
# What gloo says when it connects, and the frame around what mpiexec says.
_NOISE = re.compile(r"\[Gloo\]|peer ranks|^=|^\d+$")


class TeamError(RuntimeError):
    """The processes did not start, or one of them failed or fell silent."""


@dataclasses.dataclass(frozen=True)
class _Link:
    """The connection to one process, and what it writes."""

    socket: socket.socket
    lines: TextIO


class Team:
    """That many processes, under ``mpiexec`` if mpi4jax is there.

    Attributes:
      count: how many.
      peers: the rivals they found, with their versions, in words.
    """

    def __init__(self, count: int):
        """Says how many; the first :meth:`ask` starts them."""
        self.count = count
        self.peers = ""
        self._links: list[_Link] = []
        self._running: list[subprocess.Popen] = []
        self._output: IO[bytes] | None = None
        self._why_not: str | None = None

    def ask(self, **message) -> list[dict]:
        """Send all of them a message and return the replies, by rank.

        Raises:
          TeamError: one failed, ended or did not answer; none of them runs any more.
        """
        if not self._links:
            self._start()
        try:
            text = json.dumps(message) + "\n"
            for place, link in enumerate(self._links):
                with self._naming(place):
                    link.socket.sendall(text.encode())
            return self._replies()
        except TeamError as error:
            said = f"{error}{self._last_words()}"
            self.stop(patience=_PATIENCE_WITH_FAILED)
            raise TeamError(said) from None

    def stop(self, patience: float = 10.0) -> None:
        """End all of them; the next :meth:`ask` starts new ones.

        Args:
          patience: seconds in which they may end on their own.
        """
        atexit.unregister(self.stop)
        # The end of its messages is the end of a worker.
        for link in self._links:
            link.lines.close()
            link.socket.close()
        _end(self._running, patience)
        self._links, self._running = [], []
        if self._output is not None:
            self._output.close()
            self._output = None

    def _start(self):
        # Once is enough: what kept them from starting keeps the next ones too.
        if self._why_not is not None:
            raise TeamError(self._why_not)
        mpiexec, absent = _find_mpiexec()
        if mpiexec is not None:
            try:
                self._start_with(mpiexec, "")
                return
            except TeamError as error:
                absent = f"did not start under mpiexec: {error}"
        try:
            self._start_with(None, absent)
        except TeamError as error:
            self._why_not = f"{self.count} processes did not start: {error}"
            raise TeamError(self._why_not) from None

    def _start_with(self, mpiexec, absent):
        atexit.register(self.stop)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        try:
            # A folder of this user alone, so that nobody else's process answers; gone
            # when they have come, so that nothing is left whatever happens.
            with (
                tempfile.TemporaryDirectory(prefix="jaxcomm-") as folder,
                socket.socket(socket.AF_UNIX) as server,
            ):
                control = f"{folder}/control"
                server.bind(control)
                server.listen(self.count)
                self._running = _launch(
                    self.count, mpiexec, control, absent, self._output
                )
                self._links = self._accept(server)
            hellos = self._replies()
            order = [hello["rank"] for hello in hellos]
            if sorted(order) != list(range(self.count)):
                raise TeamError(f"the ranks are {order}; is mpiexec of the same MPI?")
            self._links = [self._links[order.index(i)] for i in range(self.count)]
            self.peers = hellos[0]["peers"]
        except (OSError, TeamError) as error:
            said = f"{error}{self._last_words()}"
            self.stop(patience=_PATIENCE_WITH_FAILED)
            raise TeamError(said) from None
        # Ctrl-C while they start.
        except BaseException:
            self.stop()
            raise

    def _accept(self, server):
        links = []
        ends = time.monotonic() + _START_SECONDS
        server.settimeout(0.2)
        while len(links) < self.count:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                ended = [p.returncode for p in self._running if p.poll() is not None]
                if ended:
                    raise TeamError(f"one ended with status {ended[0]}") from None
                if time.monotonic() > ends:
                    raise TeamError(
                        f"{len(links)} of {self.count} came within "
                        f"{_START_SECONDS:.0f} s"
                    ) from None
                continue
            accepted.settimeout(_ANSWER_SECONDS)
            links.append(_Link(accepted, accepted.makefile("r")))
        return links

    def _replies(self):
        replies: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for place, link in enumerate(self._links):
                selector.register(link.socket, selectors.EVENT_READ, place)
            while len(replies) < self.count:
                # Whoever is first: one that ends must not wait for one that hangs.
                ready = selector.select(_ANSWER_SECONDS)
                if not ready:
                    silent = sorted(set(range(self.count)) - set(replies))
                    raise TeamError(
                        f"no answer from processes {silent} in {_ANSWER_SECONDS:.0f} s"
                    )
                for key, _ in ready:
                    replies[key.data] = self._reply(key.data)
                    selector.unregister(key.fileobj)
        return [replies[place] for place in range(self.count)]

    def _reply(self, place):
        with self._naming(place):
            line = self._links[place].lines.readline()
            if not line:
                raise EOFError
        reply = json.loads(line)
        if "error" in reply:
            raise TeamError(f"process {place} of {self.count}: {reply['error']}")
        return reply

    @contextlib.contextmanager
    def _naming(self, place):
        try:
            yield
        except TimeoutError:
            raise TeamError(f"process {place} of {self.count} hangs") from None
        except (OSError, EOFError):
            raise TeamError(f"process {place} of {self.count} ended") from None

    def _last_words(self):
        """Return the end of what they printed."""
        if self._output is None:
            return ""
        # One that is about to end prints why just before.
        for process in self._running:
            _wait(process, 1.0 / self.count)
        # Not by seeking: they write where the file's one position is.
        said = os.pread(self._output.fileno(), _MOST_OUTPUT, 0)
        lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
        told = [line for line in lines if line and not _NOISE.search(line)]
        return "".join(f"; {line}" for line in told[-_LAST_LINES:])


def _launch(count, mpiexec, control, absent, output):
    """Start the workers, their output in a file; the only place that knows how."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    worker = [sys.executable, "-m", _WORKER, control, coordinator]
    if mpiexec is None:
        commands = [[*worker, str(count), str(rank), absent] for rank in range(count)]
    else:
        commands = [[mpiexec, "-n", str(count), *worker]]
    return [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the parent, who then ends them.
            start_new_session=True,
        )
        for command in commands
    ]


def _find_mpiexec():
    """Return the path of mpiexec, or None and what is missing."""
    for package in ("mpi4jax", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            return None, f"{package} is not installed"
    # That of a wheel lies beside the interpreter, also where PATH names another MPI.
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    found = shutil.which("mpiexec", path=os.pathsep.join(places))
    return found, "" if found else "mpiexec is not installed"


def _end(processes, patience):
    ends = time.monotonic() + patience
    for process in processes:
        _wait(process, ends - time.monotonic())
    # jax catches SIGTERM, but mpiexec needs it to end its processes.
    for process in processes:
        process.terminate()
    ends = time.monotonic() + _MPIEXEC_SECONDS
    for process in processes:
        _wait(process, ends - time.monotonic())
    for process in processes:
        process.kill()
        process.wait()


def _wait(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, seconds))
