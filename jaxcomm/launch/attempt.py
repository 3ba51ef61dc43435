"""One start of the job, from its first process to its last."""

import dataclasses
import os
import pathlib

from jaxcomm.launch import environment, leftovers, records
from jaxcomm.launch.job import Job, Outcome
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process
from jaxcomm.launch.restarts import Attempt
from jaxcomm.launch.signals import Signals

# As a shell has it for what it cannot start.
_CANNOT_START = 126


def run(
    attempt: Attempt, options: Options, port: int, folder: pathlib.Path, end: float
) -> Outcome:
    """Start the processes and wait for them.

    To be called by the main thread. No process is left, however it ends.

    Args:
      attempt: which slots to use.
      options: what was asked for.
      port: of the coordinator.
      folder: for flight records.
      end: ``time.monotonic()`` at which ``--timeout`` ends the run.
    """
    output = Output(options.prefix)
    inherited = os.environ | {records.VARIABLE: str(folder)}
    reports_read, reports_write = os.pipe()
    os.set_blocking(reports_read, False)
    processes = []
    signals = Signals()
    try:
        with signals:
            try:
                for number in range(len(attempt.slots)):
                    variables = environment.of_process(
                        number, options, port, inherited, attempt
                    )
                    processes.append(
                        Process(number, options, variables, reports_write, output.piped)
                    )
                if output.piped:
                    output.follow({p.number: p.pipes() for p in processes})
                job = Job(processes, reports_read, options, end, signals, output)
                outcome = job.wait()
            except OSError as error:
                # The first time, nothing has been done that were to be kept.
                if not attempt.restarts or len(processes) == len(attempt.slots):
                    raise
                output.say(f"process {len(processes)} cannot be started: {error}")
                outcome = Outcome(_CANNOT_START, failed=len(processes))
            finally:
                for process in processes:
                    process.kill()
                leftovers.end([process.pid for process in processes])
    finally:
        os.close(reports_read)
        os.close(reports_write)
        output.finish()
    # By a signal that came after the last process, or by a reader such as head.
    was_asked = outcome.was_asked or signals.are_left() or output.is_unread
    return dataclasses.replace(outcome, was_asked=was_asked)
