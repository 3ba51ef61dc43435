"""Run a program as several processes, from start to status."""

import dataclasses
import math
import os
import pathlib
import signal
import time
import uuid

from jaxcomm import compat
from jaxcomm.launch import environment, port, records
from jaxcomm.launch.job import Job, Outcome, describe
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process
from jaxcomm.launch.signals import Signals

# As argparse and Python itself end.
_WRONG_USE = 2


def run(options: Options) -> int:
    """Start the processes, again if they fail, and return the status of the run.

    To be called by the main thread. No process is left, however it ends.
    """
    try:
        with records.folder() as folder:
            return _run(options, folder)
    except port.PortTaken as error:
        _say(f"--coordinator-port: {error}")
        return _WRONG_USE
    except KeyboardInterrupt:
        # After the last process, while a reader of the output takes its time.
        return 128 + signal.SIGINT


def _run(options: Options, folder: pathlib.Path) -> int:
    end = time.monotonic() + (options.timeout or math.inf)
    inherited = os.environ | {
        "JAXCOMM_MAX_RESTARTS": str(options.max_restarts),
        "JAXCOMM_RUN_ID": uuid.uuid4().hex,
    }
    count = 0
    while True:
        # Processes of one id write files of one name.
        own = folder / f"attempt-{count}" if options.max_restarts else folder
        own.mkdir(parents=True, exist_ok=True)
        inherited["JAXCOMM_RESTART_COUNT"] = str(count)
        inherited[records.VARIABLE] = str(own)
        begin = records.now()
        with port.reserved(options.coordinator_port) as number:
            outcome = _attempt(options, number, inherited, end)
        if outcome.status:
            records.print_merged(own, begin)
        goes_on, text = _after(outcome, count, options.max_restarts)
        if text:
            _say(text)
        if not goes_on:
            return outcome.status
        count += 1


def _after(outcome: Outcome, count: int, most: int) -> tuple[bool, str]:
    """Return whether the job starts again, and what to say."""
    if not outcome.status:
        times = f"{count} restart{'s' if count > 1 else ''}"
        return False, f"done after {times}" if count else ""
    if not most or outcome.was_asked:
        return False, ""
    assert outcome.failed is not None  # the status is not 0
    cause = f"process {outcome.failed} {describe(outcome.status)}"
    if outcome.status == _WRONG_USE:
        return False, (
            f"not restarted: {cause}, which says that the program was called wrongly. "
            "Correct the call"
        )
    if count == most:
        return False, f"not restarted: {cause}, after all {most} restarts"
    return True, f"restart {count + 1} of {most}: {cause}"


def _attempt(
    options: Options, number: int, inherited: dict[str, str], end: float
) -> Outcome:
    """Start the processes and wait for them.

    Args:
      options: what was asked for.
      number: port of the coordinator.
      inherited: environment of all processes.
      end: ``time.monotonic()`` at which ``--timeout`` ends the run.
    """
    output = Output(options.prefix)
    address = f"{environment.LOOPBACK}:{number}"
    store = (
        compat.serve_jobs_store(address, options.processes) if options.elastic else None
    )
    reports_read, reports_write = os.pipe()
    os.set_blocking(reports_read, False)
    processes = []
    signals = Signals()
    try:
        with signals:
            try:
                for process in range(options.processes):
                    variables = environment.of_process(
                        process, options, number, inherited
                    )
                    processes.append(
                        Process(
                            process, options, variables, reports_write, output.piped
                        )
                    )
                if output.piped:
                    output.follow({p.number: p.pipes() for p in processes})
                job = Job(processes, reports_read, options, end, signals, output)
                outcome = job.wait()
            finally:
                for process in processes:
                    process.kill()
    finally:
        if store is not None:
            store.shutdown()
        os.close(reports_read)
        os.close(reports_write)
        output.finish()
    # By a signal that came after the last process, or by a reader such as head.
    was_asked = outcome.was_asked or signals.are_left() or output.is_unread
    return dataclasses.replace(outcome, was_asked=was_asked)


def _say(text):
    Output(prefix=False).say(text)
