"""Starts the processes of a case, injects the fault and gathers what they say."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
from collections.abc import Callable, Sequence

import waiting
from team import Process, environment, inherited, shared_files

from fault_suite import outcomes
from fault_suite.cases import Case
from fault_suite.report import End, Report, Row
from jaxcomm.launch import port


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Where cases run.

    Attributes:
      is_gpu: on GPUs, or on CPU devices over the stand-in.
      variables: of the environment.
      gpus: their numbers. One serves two processes, and no process with two ranks.
    """

    is_gpu: bool
    variables: dict[str, str]
    gpus: Sequence[int] = (0, 1)

    def takes(self, case: Case) -> bool:
        return len(self.gpus) > 1 or case.processes > 1

    def gpus_of(self, process: int, processes: int) -> list[int] | None:
        """Return what a process takes: JAX's devices, where they are no GPUs."""
        if not self.is_gpu:
            return None
        if processes == 1:
            return list(self.gpus)
        return [self.gpus[process % len(self.gpus)]]


def on_gpus(gpus: Sequence[int] = (0, 1), more=None) -> Hardware:
    variables = {
        **{n: value for n, value in os.environ.items() if n.startswith("NCCL_")},
        # Host callbacks need CPU devices, too.
        "JAX_PLATFORMS": "cuda,cpu",
        # The test process may hold GPU memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return Hardware(True, variables | (more or {}), gpus)


def over_stand_in(path: str) -> Hardware:
    """Return CPU devices over the stand-in for NCCL, which also runs our kernels."""
    nccl = {"JAXCOMM_NCCL_LIBRARY": path, "JAXCOMM_BACKEND": "nccl"}
    return Hardware(False, environment() | nccl | {"JAXCOMM_FAKE_KERNELS": "1"})


class Starter:
    """Starts the processes of any case, if asked to before they are needed."""

    def __init__(self, hardware: Hardware, folder: pathlib.Path, more=None, ahead=0):
        """Start so many ahead: importing JAX for GPUs takes seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        # Else JAX ends the survivors.
        always = {"JAX_ENABLE_RECOVERABILITY": "1"}
        self._environment = inherited() | always | hardware.variables | (more or {})
        self._folder = folder
        # Threads may take processes at the same time.
        self._numbers = itertools.count(1)
        self._waiting = [self._start() for _ in range(ahead)]

    def take(self) -> Process:
        self._waiting.append(self._start())
        return self._waiting.pop(0)

    def stop(self):
        while self._waiting:
            self._waiting.pop().stop()

    def _start(self):
        log = self._folder / f"worker-{next(self._numbers)}.txt"
        return Process(self._environment, log)


starter = Starter


class Begun:
    """The processes of some cases, on their way to the first fault.

    Processes of several cases may get ready at the same time.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        hardware: Hardware,
        folder: pathlib.Path,
        starts: Starter,
    ):
        """Start them.

        They run one case after the other, each of which but the last must leave them
        fit for the next. The folder gets flight records.
        """
        self._cases = cases
        self._folder = folder
        self._stack = contextlib.ExitStack()
        count = cases[0].processes
        number = self._stack.enter_context(port.reserved(0))
        plan = {
            "cases": [dataclasses.asdict(case) for case in cases],
            "processes": count,
            "devices": 2 // count,
            "address": f"127.0.0.1:{number}",
            "is_gpu": hardware.is_gpu,
            "variables": {
                "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
                "JAXCOMM_DUMP_DIR": str(folder / "dumps"),
            },
        }
        self._processes = []
        for index in range(count):
            process = starts.take()
            process.index = index
            self._processes.append(process)
            self._stack.callback(process.stop)
            mine = plan | {"process": index, "gpus": hardware.gpus_of(index, count)}
            process.tell(
                f"from fault_suite import part\npart.take_part({mine!r}, say, hear)"
            )

    def finish(
        self,
        hang_seconds: float = waiting.HANG_SECONDS,
        then: Callable[[], object] = lambda: None,
    ) -> list[Report]:
        """Inject the faults, end the processes and return a report for each case.

        What has not ended after ``hang_seconds`` hangs. ``then`` is called when the
        processes have only to end.
        """
        processes = self._processes
        with self._stack:
            reports = [_run(case, processes, hang_seconds) for case in self._cases]
            then()
            _end(reports[-1], processes, self._folder, hang_seconds)
        reports[-1].left = shared_files(process.pid for process in processes)
        return reports

    def stop(self) -> None:
        self._stack.close()


def _lines(process, event, case):
    with process.changed:
        return [
            line
            for line in process.heard
            if line.get("event") == event and line["case"] == str(case)
        ]


def until(process, event, case, seconds=waiting.HANG_SECONDS):
    """Wait for an event; return None if the process or the time ends first."""
    with process.changed:
        process.changed.wait_for(
            lambda: _lines(process, event, case) or process.has_ended, seconds
        )
    return next(iter(_lines(process, event, case)), None)


def _run(case, processes, hang_seconds):
    is_prefilled = True
    for process in processes:
        ready = until(process, "ready", case)
        if ready is not None:
            is_prefilled &= ready["is_prefilled"]
        else:
            return Report(case, trouble=f"it did not become ready: {process.state()}")
    victim = None if case.victim is None else processes[case.victim]
    actors = [process for process in processes if process is not victim]
    going = processes if case.fault == "killed_in_loop" else actors
    for process in going:
        process.tell("go")
    if victim is not None:
        for process in going:
            if until(process, "waiting", case) is None:
                return Report(case, trouble=f"process {process.index} never waited")
        if case.fault == "exits":
            # Not from its end: NCCL 2.32 waits there for the rank that waits for it.
            victim.tell("leave")
            until(victim, "left", case)
        elif case.fault == "stopped":
            victim.popen.send_signal(signal.SIGSTOP)
        else:
            victim.popen.kill()
    report = Report(case, is_prefilled=is_prefilled)
    for actor in actors:
        until(actor, "done", case, hang_seconds)
        report.rows += _rows(actor, case)
    return report


def _rows(process, case):
    rows = [
        Row(line["what"], line["rank"], line["outcome"], line["text"])
        for line in _lines(process, "row", case)
    ]
    ranks = range(2) if case.processes == 1 else [process.index]
    is_done = bool(_lines(process, "done", case))
    outcome = outcomes.EXITED if process.has_ended else outcomes.HUNG
    for rank in ranks:
        had = {row.what for row in rows if row.rank == rank}
        if "result" not in had:
            rows.append(Row("result", rank, outcome))
        elif not is_done:
            rows.append(Row("afterwards", rank, outcome))
    return rows


def _end(report, processes, folder, hang_seconds):
    """Have all leave, and fill in how they ended."""
    # The coordinator, in process 0, last: JAX ends the others when they lose it. But
    # JAX keeps a process that leaves in order until all leave.
    if report.case.fault == "exits":
        for process in processes:
            process.tell("leave")
    if report.case.fault == "stopped":
        processes[report.case.victim].popen.kill()
    for process in reversed(processes):
        process.tell("leave")
        by_itself = process.has_left(hang_seconds)
        if not by_itself:
            process.popen.kill()
        found = (folder / "dumps").glob(f"flight-record-{process.index}.json")
        report.ends[process.index] = End(
            process.popen.returncode if by_itself else None,
            process.said(),
            [str(path) for path in found],
        )
