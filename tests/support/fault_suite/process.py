"""The processes of a case, as their parent sees them."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading

import forked
import waiting


class Process:
    """A worker, and the lines it said so far."""

    def __init__(self, environment, log):
        """Start it; it imports, then waits for its plan.

        Args:
          environment: its variables.
          log: the file that gets what it prints on stderr.
        """
        self.index = 0
        self._log = log
        with log.open("wb") as file:
            self.popen = forked.Popen(
                [sys.executable, "-m", "fault_suite.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
            )
        self._lines = []
        self._changed = threading.Condition()
        self.has_ended = False
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self):
        for line in self.popen.stdout:
            # What others print on stdout is no line of the worker's.
            with contextlib.suppress(json.JSONDecodeError):
                heard = json.loads(line)
                with self._changed:
                    self._lines.append(heard)
                    self._changed.notify_all()
        # The pipe is closed when the process ends, by whatever.
        self.popen.wait()
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def begin(self, plan):
        """Tell it what to do."""
        self.index = plan["process"]
        self.tell(json.dumps(plan))

    def until(self, event, case, seconds=waiting.HANG_SECONDS) -> dict | None:
        """Wait for an event; return None if the process or the time ends first."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.lines(event, case) or self.has_ended, seconds
            )
            return next(iter(self.lines(event, case)), None)

    def lines(self, event, case):
        """Return what it said of an event so far."""
        with self._changed:
            return [
                line
                for line in self._lines
                if line["event"] == event and line.get("case", case) == case
            ]

    def tell(self, word):
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(word.encode() + b"\n")
            self.popen.stdin.flush()

    def wait(self, seconds=waiting.HANG_SECONDS):
        """Wait for its end; return whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_ended, seconds)

    def stop(self):
        self.popen.kill()
        self._reader.join()
        self.popen.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()

    def said(self):
        return self._log.read_text(errors="replace")


class Starter:
    """Starts workers, if asked to before they are needed, while others work."""

    def __init__(self, environment: dict[str, str], folder: pathlib.Path, ahead=0):
        """Start as many ahead.

        Args:
          environment: of all workers.
          folder: for what they print on stderr.
          ahead: how many are to be ready; importing JAX for GPUs takes seconds.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = environment
        self._folder = folder
        self._count = 0
        self._waiting = [self._start() for _ in range(ahead)]

    def take(self) -> Process:
        """Return a worker without a plan; the caller stops it."""
        self._waiting.append(self._start())
        return self._waiting.pop(0)

    def stop(self):
        """End those that nobody took."""
        for process in self._waiting:
            process.stop()
        self._waiting.clear()

    def _start(self):
        self._count += 1
        return Process(self._environment, self._folder / f"worker-{self._count}.txt")
