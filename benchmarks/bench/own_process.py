"""Measure a case in a process that has exactly as many devices as take part.

XLA gives a process threads by the number of its devices. Two of eight devices are
slower than two alone, and not by the same factor with one library and the other.
"""

import contextlib
import dataclasses
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from bench import devices as on
from bench import plan, run
from bench.cases import Case, Session, TimedCase
from bench.options import Options
from bench.rows import Row


class Processes:
    """The processes of a run, one at a time.

    Args:
      options: what was asked for. Each process makes the cases of it anew, for what a
        case builds cannot be sent.
    """

    def __init__(self, options: Options):
        self._options = options
        self._running: _Running | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def cases(self) -> list[Case]:
        """Return what to measure; what is timed on devices is measured in a process."""
        return [
            _Elsewhere.of(case, index, self) if isinstance(case, TimedCase) else case
            for index, case in enumerate(plan.cases(self._options))
        ]

    def measure(self, index: int, devices: int) -> Sequence[Row]:
        """Measure a case in a process with that many devices.

        Args:
          index: of the case among those of the options.
          devices: how many. The process before goes if it has another number.

        Raises:
          RuntimeError: the process ended. The next call starts another one.
        """
        if self._running is not None and self._running.devices != devices:
            self.stop()
        if self._running is None:
            with _interrupts_wait():
                self._running = _start(self._options, devices)
        running = self._running
        try:
            running.pipe.send(index)
            return running.pipe.recv()
        except (EOFError, OSError):
            running.process.join()
            status = running.process.exitcode
            self.stop()
            raise RuntimeError(
                f"the process with {devices} devices ended with status {status}"
            ) from None

    def stop(self) -> None:
        """End the process, if there is one, whatever it is doing."""
        if self._running is None:
            return
        self._running.process.kill()
        self._running.process.join()
        self._running.pipe.close()
        self._running = None


@dataclasses.dataclass(frozen=True)
class _Running:
    process: SpawnProcess
    pipe: Connection
    devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Elsewhere(Case):
    """A case that a process of its own measures."""

    index: int
    processes: Processes

    @classmethod
    def of(cls, case, index, processes):
        common = {
            field.name: getattr(case, field.name) for field in dataclasses.fields(Case)
        }
        return cls(index=index, processes=processes, **common)

    def measure(self, session: Session) -> Sequence[Row]:
        return self.processes.measure(self.index, self.devices)


def _start(options, devices):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, options, devices), daemon=True
    )
    process.start()
    theirs.close()
    return _Running(process, ours, devices)


@contextlib.contextmanager
def _interrupts_wait():
    """Put Ctrl-C off, lest half a process be started, and keep it from the process."""
    # Python starts this process with the first other one, and lets Ctrl-C in again.
    resource_tracker.ensure_running()
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda *details: pressed.append(details))
    # Inherited by the process. Other threads here go on to take the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _serve(pipe, options, devices):
    on.simulate(devices)
    session = plan.session(options, devices)
    cases = list(plan.cases(options))
    try:
        while True:
            pipe.send(run.measure(cases[pipe.recv()], session))
    # The other end is gone.
    except (EOFError, OSError):
        pass
