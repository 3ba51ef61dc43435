"""Run a program as several processes, from start to status."""

import os
import signal
import sys

from jaxcomm.launch import environment, port, records
from jaxcomm.launch.job import Job
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process
from jaxcomm.launch.signals import Signals

_WRONG_USE = 2


def run(options: Options) -> int:
    """Start the processes, wait for them, and return the status of the run.

    To be called by the main thread. No process is left, however it ends.
    """
    try:
        with records.folder() as folder, port.reserved(options.coordinator_port) as at:
            begin = records.now()
            status = _run(options, at, folder)
            if status:
                records.print_merged(folder, begin)
    except port.PortTaken as error:
        print(f"jaxcomm.launch: --coordinator-port: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        # After the last process, while a reader of the output takes its time.
        return 128 + signal.SIGINT
    return status


def _run(options, at, folder):
    output = Output(options.prefix)
    inherited = os.environ | {records.VARIABLE: str(folder)}
    reports_read, reports_write = os.pipe()
    os.set_blocking(reports_read, False)
    processes = []
    try:
        with Signals() as signals:
            try:
                for number in range(options.processes):
                    variables = environment.of_process(number, options, at, inherited)
                    processes.append(
                        Process(number, options, variables, reports_write, output.piped)
                    )
                if output.piped:
                    output.follow({p.number: p.pipes() for p in processes})
                return Job(processes, reports_read, options, signals, output).wait()
            finally:
                for process in processes:
                    process.kill()
    finally:
        os.close(reports_read)
        os.close(reports_write)
        output.finish()
