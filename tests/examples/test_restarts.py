"""Training that goes on from its last checkpoint though processes are killed."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import time

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
PROCESSES = 2
STEPS = 150
KILLS = 10
# Found: 1e-6.
TOLERANCE = 1e-4
LAUNCHER = ("-m", "jaxcomm.launch", "--max-restarts=10", "--grace=0.3")
DEMO = (
    "-m", "language_model", "--sequence=61", "--layers=1", "--width=16", "--nocheck",
    f"--steps={STEPS}", "--checkpoint_every=3",
)  # fmt: skip


class Run:
    """A run of the demo under the launcher, watched from outside."""

    def __init__(self, folder, output, *options, processes=PROCESSES):
        self._checkpoints = folder.path / output / "checkpoints"
        self._err = folder.path / f"{output}.txt"
        count = f"--processes={processes}"
        words = (*LAUNCHER, count, *options, *DEMO, f"--output={output}")
        # A pipe that nobody reads would be full after some failures.
        with self._err.open("w") as err:
            self.process = folder.start(*words, stderr=err)

    def until(self, condition):
        """Waits for a condition that becomes true while the run goes on."""
        deadline = time.monotonic() + 200
        while not (found := condition()):
            assert self.process.poll() is None, self._err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return found

    def saved(self):
        """Returns the last step of which there is a checkpoint, 0 for none."""
        return max((int(name) for name in self._names() if name.isdigit()), default=0)

    def is_saving(self):
        """Says whether a checkpoint is half written."""
        return any("tmp" in name for name in self._names())

    def worker(self, process, attempt):
        """Returns the process id of a process of an attempt, None before it is there.

        Args:
          process: its number.
          attempt: number of restarts before it.
        """
        wanted = {
            f"JAX_PROCESS_ID={process}".encode(),
            f"JAXCOMM_RESTART_COUNT={attempt}".encode(),
        }
        launcher = self.process.pid
        for pid in _read(f"/proc/{launcher}/task/{launcher}/children").split():
            environment = _read(f"/proc/{int(pid)}/environ")
            if wanted <= set(environment.split(b"\0")):
                return int(pid)
        return None

    @contextlib.contextmanager
    def stopped(self, attempt):
        """Keeps all processes of an attempt from going on; gives their process ids."""
        pids = [self.worker(process, attempt) for process in range(PROCESSES)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.until(lambda: all(map(_is_stopped, pids)))
        yield pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def result(self):
        """Waits for the end; returns losses of all steps, the summary and stderr."""
        out, _ = self.process.communicate(timeout=200)
        err = self._err.read_text()
        assert self.process.returncode == 0, err
        about = self._checkpoints / str(STEPS) / "about" / "metadata"
        (summary,) = re.findall(r"^\[0\] (loss \d.* on text held out .*)$", out, re.M)
        return json.loads(about.read_text())["losses"], summary, err

    def _names(self):
        return os.listdir(self._checkpoints) if self._checkpoints.is_dir() else []


def _read(path):
    try:
        return pathlib.Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_stopped(pid):
    """Says whether a process, and so all that it writes, stands still."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] == [b"T"]


@pytest.fixture(scope="module")
def undisturbed(make_folder):
    """The folder of a run that nobody killed, its losses and its last line."""
    folder = make_folder()
    losses, summary, err = Run(folder, "undisturbed").result()
    assert len(losses) == STEPS
    assert err == ""
    return folder, losses, summary


def kill_while_it_saves(run, victim, attempt):
    """Kills a process when a checkpoint is half written, and cannot become whole."""
    while True:
        run.until(run.is_saving)
        with run.stopped(attempt) as pids:
            # It may have become whole before they stood still.
            if run.is_saving():
                os.kill(pids[victim], signal.SIGKILL)
                return


@pytest.mark.timeout(600)
def test_ten_killed_processes_change_nothing(undisturbed):
    folder, losses, summary = undisturbed
    chance = random.Random(23)
    run = Run(folder, "disturbed")
    victims, half_written = [], []
    for attempt in range(KILLS):
        victim = chance.randrange(PROCESSES)
        victims.append(victim)
        before = run.saved()
        # Never without progress: the run would not end.
        run.until(lambda before=before: run.saved() > before)
        if chance.random() < 0.6:
            kill_while_it_saves(run, victim, attempt)
            half_written.append(victim)
        else:
            time.sleep(chance.uniform(0, 0.1))
            os.kill(run.worker(victim, attempt), signal.SIGKILL)
        run.until(lambda count=attempt + 1: run.worker(0, count))
    *found, err = run.result()
    assert found == [losses, summary]
    assert len(re.findall("was ended by SIGKILL; stopping the others", err)) == KILLS
    assert f"jaxcomm.launch: done after {KILLS} restarts" in err
    assert set(victims) == set(range(PROCESSES))
    # Process 0 writes, and has left some half written. That is not kept.
    assert 0 in half_written
    assert not run.is_saving()


@pytest.mark.timeout(600)
def test_goes_on_with_fewer_processes(undisturbed):
    folder, losses, _ = undisturbed
    run = Run(folder, "fewer", "--min-processes=2", processes=3)
    run.until(run.saved)
    os.kill(run.worker(1, 0), signal.SIGKILL)
    for attempt in (1, 2):
        pid = run.until(lambda attempt=attempt: run.worker(1, attempt))
        os.kill(pid, signal.SIGKILL)
    found, _, err = run.result()
    assert "Slot 1 failed 2 times at the start and is left out: 2 of 3" in err
    assert "jaxcomm.launch: done after 3 restarts" in err
    assert found == pytest.approx(losses, abs=TOLERANCE)
    # It did not begin again: a ring of three adds in another order than one of two.
    assert found != losses
