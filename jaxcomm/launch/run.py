"""Run a program as several processes, from start to status."""

import contextlib
import math
import signal
import time

from jaxcomm.launch import attempt, port, records
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.restarts import Restarts

_WRONG_USE = 2


def run(options: Options) -> int:
    """Start the processes, again if they fail, and return the status of the run.

    To be called by the main thread. No process is left, however it ends.
    """
    try:
        with records.folder() as folder, port.Ports(options.coordinator_port) as ports:
            return _run(options, ports, folder)
    except port.PortTaken as error:
        _say(f"--coordinator-port: {error}")
        return _WRONG_USE
    except KeyboardInterrupt:
        # After the last process, while a reader of the output takes its time.
        return 128 + signal.SIGINT


def _run(options, ports, folder):
    end = time.monotonic() + (options.timeout or math.inf)
    restarts = Restarts(options)
    while True:
        now = restarts.attempt
        with _folder_of(now, options, folder) as own:
            begin = records.now()
            outcome = attempt.run(now, options, ports.next(), own, end)
            if outcome.status:
                records.print_merged(own, begin)
        if text := restarts.after(outcome):
            _say(text)
        if restarts.attempt is now:
            return outcome.status


def _folder_of(now, options, folder):
    """Return where the records go: apart, if there are to be several attempts."""
    if not options.max_restarts:
        return contextlib.nullcontext(folder)
    return records.of_attempt(folder, now.restarts)


def _say(text):
    Output(prefix=False).say(text)
