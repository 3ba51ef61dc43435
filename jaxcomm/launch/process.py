"""One of the processes: a session of its own, with all that it starts."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from jaxcomm.launch.options import Options

_CHILD = pathlib.Path(__file__).with_name("child.py")
_SHARED_MEMORY = pathlib.Path("/dev/shm")
# A process that waits for a device or a file system does not end before that answers.
UNKILLABLE_SECONDS = 5.0
# Threads of jaxcomm's own: to answer takes time, too.
_OURS = "jaxcomm"


@dataclasses.dataclass(frozen=True)
class Usage:
    """What the kernel says of a process at one moment.

    Attributes:
      state: the letter of proc(5) for its first thread.
      cpu: seconds that its threads have run, without those of jaxcomm.
      time: of ``time.monotonic()``.
      call: the kernel's function in which its first thread waits; empty if unknown.
    """

    state: str
    cpu: float
    time: float
    call: str = ""


class Process:
    """A running program and whatever it starts, unless that leaves the process group.

    Args:
      number: its process id in ``jax.distributed``.
      options: the program to run.
      environment: all of its environment variables.
      reports: pipe to which it writes when its program fails, before it ends.
      piped: whether ``stdout`` and ``stderr`` are pipes or those of the launcher.
    """

    def __init__(
        self,
        number: int,
        options: Options,
        environment: Mapping[str, str],
        reports: int,
        piped: bool,
    ):
        stream = subprocess.PIPE if piped else None
        # It shows what ended it once the launcher has named whom it suspects.
        waits, self._release = os.pipe()
        self.number = number
        self._popen = subprocess.Popen(
            [
                sys.executable,
                # -W, -X and the like, as multiprocessing passes them on.
                *subprocess._args_from_interpreter_flags(),  # pyright: ignore[reportAttributeAccessIssue]
                "-u",
                str(_CHILD),
                f"--launcher={os.getpid()}",
                f"--reports={reports}",
                f"--released={waits}",
                *(["-m"] if options.module else []),
                options.script,
                *options.arguments,
            ],
            # Only one can read what is typed; mpirun gives it to the same.
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            pass_fds=(reports, waits),
            start_new_session=True,
        )
        os.close(waits)

    @property
    def pid(self) -> int:
        """Its id of the operating system."""
        return self._popen.pid

    def release(self) -> None:
        """Let it show what ended it, if its program failed."""
        if self._release >= 0:
            os.close(self._release)
            self._release = -1

    def usage(self) -> Usage | None:
        """Return what the kernel says of it; None if that is hidden, or it is gone."""
        folder = pathlib.Path(f"/proc/{self._popen.pid}")
        nanoseconds = 0
        try:
            for task in (folder / "task").iterdir():
                # A thread may end at any moment.
                with contextlib.suppress(OSError):
                    if not (task / "comm").read_text().startswith(_OURS):
                        text = (task / "schedstat").read_text()
                        nanoseconds += int(text.split()[0])
        except OSError:
            return None
        return Usage(self.state(), nanoseconds * 1e-9, time.monotonic(), self._call())

    def _call(self) -> str:
        try:
            call = pathlib.Path(f"/proc/{self._popen.pid}/wchan").read_text()
        except OSError:
            return ""
        return call if call.isidentifier() else ""

    def pipes(self) -> tuple[int, int]:
        """Return stdout and stderr, which the caller has to close."""
        pipes = []
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            pipes.append(os.dup(stream.fileno()))
            stream.close()
        return pipes[0], pipes[1]

    @contextlib.contextmanager
    def watched(self) -> Iterator[int | None]:
        """Yield a file descriptor that becomes readable when it ends, if there is one.

        Linux has them; some containers forbid them.
        """
        try:
            watch = os.pidfd_open(self._popen.pid)
        except (AttributeError, OSError):
            yield None
            return
        try:
            yield watch
        finally:
            os.close(watch)

    def catches(self, number: int) -> bool:
        """Say whether it has a handler for a signal."""
        try:
            status = pathlib.Path(f"/proc/{self._popen.pid}/status").read_text()
        except OSError:
            return False
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)

    def send(self, number: int):
        """Send a signal to it alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, number)

    def send_all(self, number: int):
        """Send a signal to it and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def has_ended(self) -> bool:
        """Say whether it has ended; if so, ends what it left running."""
        if self._popen.returncode is None:
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self._popen.pid, flags) is None:
                return False
            # Before it is waited for: until then no other process gets its number.
            self.send_all(signal.SIGKILL)
            self._popen.wait()
        return True

    def state(self) -> str:
        """Return the letter of proc(5) for its state, "?" if that is hidden."""
        try:
            text = pathlib.Path(f"/proc/{self._popen.pid}/stat").read_text()
        except OSError:
            return "?"
        return text.rpartition(")")[2].split()[0]

    def leave_behind(self):
        """Wait for it no more: it was killed, and the kernel does not end it."""
        # Whenever the kernel ends it, it does so by this signal.
        self._popen.returncode = -signal.SIGKILL

    def kill(self):
        """End it and all that it has started, wait if it ends, and clean up.

        Deletes shared memory, and closes pipes nobody took.
        """
        self.release()
        if self._popen.returncode is None:
            self.send_all(signal.SIGKILL)
            try:
                self._popen.wait(UNKILLABLE_SECONDS)
            except subprocess.TimeoutExpired:
                self.leave_behind()
        # Left by one that is killed between making and unlinking it, see segment.cc.
        for path in _SHARED_MEMORY.glob(f"jaxcomm-{self._popen.pid}-*"):
            # Another user's process may have had the same number.
            with contextlib.suppress(OSError):
                path.unlink()
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()

    @property
    def status(self) -> int:
        """As a shell gives it, 128 + n after signal n; only once it has ended."""
        code = self._popen.returncode
        return 128 - code if code < 0 else code
