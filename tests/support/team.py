"""Processes that tests start, put to work together, and stop, break or kill."""

import contextlib
import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import forked
import waiting

from jaxcomm.launch import port

WORKER = pathlib.Path(__file__).with_name("worker.py")


def inherited():
    """Return variables, without choices of the user's and proxies, which gRPC asks."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA_", "NCCL_"))
        and not name.lower().endswith("_proxy")
    }


def environment(devices=1):
    return inherited() | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
    }


def shared_files(pids):
    """Return the names in /dev/shm that are of some processes, by their ids."""
    found = set(map(str, pids))
    return [n for n in os.listdir("/dev/shm") if found & set(n.split("-"))]


class Process:
    """A worker, see worker.py, and what it said so far.

    Attributes:
      popen: the process; what it prints goes to the file that ``said()`` reads.
      heard: the messages it sent.
      has_ended: whether it has, by whatever.
      changed: told of both.
    """

    def __init__(self, environment, log, *, options=(), worker=WORKER, changed=None):
        """Start it; it imports JAX, then does what it is told."""
        self.index = 0
        self._log = log
        with log.open("wb") as file:
            self.popen = forked.Popen(
                [sys.executable, *options, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
            )
        self.heard = []
        self.has_ended = False
        self.changed = changed or threading.Condition()
        self._answers = 0
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self):
        for line in self.popen.stdout:
            # Of one that is killed while it speaks, a part.
            with contextlib.suppress(json.JSONDecodeError), self.changed:
                self.heard.append(json.loads(line))
                self.changed.notify_all()
        self.popen.wait()
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

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
        with self.changed:
            self.changed.wait_for(
                lambda: self.unheard() or self.has_ended, waiting.HANG_SECONDS
            )
            assert self.answers(), self.state()
            self._answers += 1
            return self.heard[self._answers - 1]["answer"]

    def unheard(self):
        return self.heard[self._answers :]

    def answers(self):
        return bool(self.unheard()) and "answer" in self.unheard()[0]

    def state(self):
        state = f"ended with {self.popen.poll()}" if self.has_ended else "is silent"
        if self.unheard():
            state = self.unheard()[0].get("raised", "answered")
        return f"process {self.index}: {state}; it said: {self.said()[-3000:]}"

    def ask(self, code):
        self.tell(code)
        return self.hear()

    def ends(self):
        return self.popen.wait(waiting.HANG_SECONDS)

    def has_left(self, seconds):
        with self.changed:
            return self.changed.wait_for(lambda: self.has_ended, seconds)

    def said(self):
        return self._log.read_text(errors="replace")

    def stop(self):
        self.popen.kill()
        self._reader.join()
        self.popen.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        assert "misuse of the stand-in" not in self.said(), self.said()[-3000:]


class Team:
    """Processes of one jax.distributed job, by their indices there.

    Attributes:
      broken: whether one of them has failed to answer.
    """

    def __init__(self, count, folder, *, devices=1, copies=False, options=(), **more):
        """Start them all.

        Args:
          count: how many.
          folder: for what they print.
          devices: virtual devices of each.
          copies: whether each runs a file of its own.
          options: of Python.
          more: environment variables.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.broken = False
        self._changed = threading.Condition()
        self._processes = []
        for index in range(count):
            worker = WORKER
            if copies:
                worker = folder / f"folder-of-{index}" / WORKER.name
                worker.parent.mkdir()
                shutil.copy(WORKER, worker)
            made = Process(
                environment(devices) | more,
                folder / f"process-{index}.txt",
                options=options,
                worker=worker,
                changed=self._changed,
            )
            made.index = index
            self._processes.append(made)
        try:
            with port.reserved(0) as number:
                for process in self:
                    process.tell(f"join({count}, {process.index}, {number})")
                self._hear(self)
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, index):
        return self._processes[index]

    def __iter__(self):
        return iter(self._processes)

    def ask(self, code, of=None):
        """Have some of them, or all, execute Python; return their answers in order."""
        some = self._processes if of is None else [self[i] for i in of]
        for process in some:
            process.tell(code)
        return self._hear(some)

    def call(self, function, at=None, **arguments):
        """Return what ``function(here, mesh, **arguments)`` returns in each, by JSON.

        The test fails, with what all have to say, if it raises or hangs in any.

        Args:
          function: of a file that can be imported.
          at: arguments of ``here.mesh``. Where that has no device nothing runs. If
            None the function gets no mesh.
          arguments: more of them, as of JSON.
        """
        of = inspect.getfile(function), function.__name__, at, arguments
        return self.ask(f"answer = call(*{of!r})")

    def _hear(self, some):
        def all_answer():
            return all(process.answers() for process in some)

        def is_over():
            return all_answer() or any(
                process.has_ended or process.unheard()
                for process in some
                if not process.answers()
            )

        with self._changed:
            self._changed.wait_for(is_over, waiting.HANG_SECONDS)
            if not all_answer():
                # The others may wait for it: they get a moment to say so.
                self._changed.wait_for(all_answer, waiting.EXPIRES_SECONDS)
                self.broken = True
                raise AssertionError("\n".join(process.state() for process in some))
        return [process.hear() for process in some]

    def end(self):
        """Have them end by themselves, and check that they do so in order."""
        for process in self:
            process.popen.stdin.close()
        statuses = [process.ends() for process in self]
        self.stop()
        assert not any(statuses), [process.state() for process in self]

    def stop(self):
        # Process 0 last: jax.distributed ends the others when they lose it.
        for process in reversed(self._processes):
            process.stop()
        assert self.shared_files() == []

    def shared_files(self):
        """Return the names in /dev/shm that are of these."""
        return shared_files(process.pid for process in self)


@contextlib.contextmanager
def starting(folder, **always):
    """Give a function that starts teams; end what it has started."""
    teams = []

    def start(count, **options):
        teams.append(Team(count, folder / f"team-{len(teams)}", **always, **options))
        return teams[-1]

    try:
        yield start
    finally:
        for one in teams:
            one.stop()
