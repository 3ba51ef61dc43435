"""Starts the processes of a case, injects the fault and gathers what they say."""

import contextlib
import dataclasses
import os
import pathlib
import socket
from collections.abc import Callable, Sequence

import waiting

from fault_suite import outcomes
from fault_suite.cases import Case
from fault_suite.process import Starter
from fault_suite.report import End, Report, Row

_SUPPORT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Where cases run.

    Attributes:
      is_gpu: on GPUs, or on CPU devices over the stand-in.
      variables: of the environment.
      count: of GPUs. One serves two processes, and no process with two ranks.
    """

    is_gpu: bool
    variables: dict[str, str]
    count: int = 2

    def takes(self, case: Case) -> bool:
        """Return whether a case can run there."""
        return self.count > 1 or case.processes > 1


def on_gpus(count: int = 2, more: dict[str, str] | None = None) -> Hardware:
    """Return two GPUs, or one.

    Args:
      count: 1 or 2.
      more: environment variables.
    """
    variables = {
        # Host callbacks need CPU devices, too.
        "JAX_PLATFORMS": "cuda,cpu",
        # The test process may hold GPU memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return Hardware(True, variables | (more or {}), count)


def over_stand_in(path: str) -> Hardware:
    """Return CPU devices over the stand-in for NCCL, which also runs our kernels."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("QUICK_XLA_FLAGS", ""),
        "JAXCOMM_NCCL_LIBRARY": path,
        "JAXCOMM_BACKEND": "nccl",
        "JAXCOMM_FAKE_KERNELS": "1",
    }
    return Hardware(False, variables)


def starter(
    hardware: Hardware,
    folder: pathlib.Path,
    more: dict[str, str] | None = None,
    ahead: int = 0,
) -> Starter:
    """Return what starts the processes of any case.

    Args:
      hardware: where they run.
      folder: for what they print.
      more: environment variables.
      ahead: how many processes import JAX before they are needed.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAXCOMM_")
        and not name.lower().endswith("_proxy")
        # Those of the tests are for CPUs. Users' programs on GPUs have none.
        and name != "XLA_FLAGS"
        and (hardware.is_gpu or not name.startswith("NCCL_"))
    }
    # As it is, if it has the folder: so the processes can be forked.
    path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*path, str(_SUPPORT)])),
        # Else JAX ends the survivors.
        "JAX_ENABLE_RECOVERABILITY": "1",
        **hardware.variables,
        **(more or {}),
    }
    return Starter(environment, folder, ahead)


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

        Args:
          cases: of the same number of processes, which run them one after the other.
            Each case but the last must leave its processes fit for the next.
          hardware: where.
          folder: for flight records, and where the processes meet.
          starts: the processes.
        """
        self._cases = cases
        self._folder = folder
        self._stack = contextlib.ExitStack()
        count = cases[0].processes
        # Keeps the port from others. The coordinator can bind it: gRPC shares ports.
        keeper = self._stack.enter_context(socket.socket())
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", 0))
        plan = {
            "cases": [dataclasses.asdict(case) for case in cases],
            "processes": count,
            "devices": 2 // count,
            "address": f"127.0.0.1:{keeper.getsockname()[1]}",
            "is_gpu": hardware.is_gpu,
            "variables": {
                "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
                "JAXCOMM_DUMP_DIR": str(folder / "dumps"),
            },
        }
        self._processes = []
        for index in range(count):
            self._processes.append(starts.take())
            self._stack.callback(self._processes[-1].stop)
            place = {"process": index, "gpu": index % hardware.count}
            self._processes[-1].begin(plan | place)

    def finish(
        self,
        hang_seconds: float = waiting.HANG_SECONDS,
        then: Callable[[], object] = lambda: None,
    ) -> list[Report]:
        """Inject the faults, end the processes and return a report for each case.

        Args:
          hang_seconds: after which what has not ended hangs.
          then: is called when the processes have only to end.
        """
        processes = self._processes
        with self._stack:
            reports = [_run(case, processes, hang_seconds) for case in self._cases]
            then()
            _end(reports[-1], processes, self._folder, hang_seconds)
        ours = tuple(f"jaxcomm-{process.popen.pid}-" for process in processes)
        reports[-1].left = [
            name for name in os.listdir("/dev/shm") if name.startswith(ours)
        ]
        return reports

    def stop(self) -> None:
        """End the processes, where nobody injects the faults."""
        self._stack.close()


def _run(case, processes, hang_seconds):
    name = str(case)
    is_prefilled = True
    for process in processes:
        ready = process.until("ready", name)
        if ready is not None:
            is_prefilled &= ready["is_prefilled"]
        else:
            broken = "".join(line["text"] for line in process.lines("broken", name))
            text = broken or process.said()[-3000:]
            return Report(
                case, trouble=f"process {process.index} did not become ready: {text}"
            )
    victim = None if case.victim is None else processes[case.victim]
    actors = [process for process in processes if process is not victim]
    going = processes if case.fault == "killed_in_loop" else actors
    for process in going:
        process.tell("go")
    if victim is not None:
        for process in going:
            if process.until("waiting", name) is None:
                return Report(case, trouble=f"process {process.index} never waited")
        if case.fault == "exits":
            # Not from its end: NCCL 2.32 waits there for the rank that waits for it.
            victim.tell("leave")
            victim.until("left", name)
        else:
            victim.popen.kill()
    report = Report(case, is_prefilled=is_prefilled)
    for actor in actors:
        actor.until("done", name, hang_seconds)
        report.rows += _rows(actor, case)
    return report


def _rows(process, case):
    """Return what the process said, and for what it did not say that it hung."""
    rows = [
        Row(line["what"], line["rank"], line["outcome"], line["text"])
        for line in process.lines("row", str(case))
    ]
    ranks = range(2) if case.processes == 1 else [process.index]
    is_done = bool(process.lines("done", str(case)))
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
    for process in reversed(processes):
        process.tell("leave")
        by_itself = process.wait(hang_seconds)
        if not by_itself:
            process.popen.kill()
            process.wait()
        found = (folder / "dumps").glob(f"flight-record-{process.index}.json")
        report.ends[process.index] = End(
            process.popen.returncode if by_itself else None,
            process.said(),
            [str(path) for path in found],
        )
