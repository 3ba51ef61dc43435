"""Run a program as several processes, from start to status."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Iterator

from jaxcomm import compat
from jaxcomm.diagnostics.seen import describe
from jaxcomm.launch import devices, environment, folder, port, records, watch
from jaxcomm.launch.ends import Ends
from jaxcomm.launch.job import Job
from jaxcomm.launch.messages import SecretRefused
from jaxcomm.launch.options import Options
from jaxcomm.launch.outcome import WRONG_USE, Outcome
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process
from jaxcomm.launch.report import Report
from jaxcomm.launch.signals import Signals
from jaxcomm.launch.watch import CpuWatch, NcclWatch
from jaxcomm.launch.witness import Witness


def run(options: Options) -> int:
    """Start the processes, again if they fail, and return the status of the run.

    To be called by the main thread. No process is left, however it ends.
    """
    try:
        with folder.of_run() as own:
            chosen = devices.choose(options, os.environ)
            if chosen.text:
                _say(chosen.text)
            options = dataclasses.replace(options, platform=chosen.platform)
            return _run(options, own)
    except (port.PortTaken, records.FolderRefused, SecretRefused) as error:
        _say(str(error))
        return WRONG_USE
    except KeyboardInterrupt:
        # After the last process, while a reader of the output takes its time.
        return 128 + signal.SIGINT


def _run(options: Options, own: pathlib.Path) -> int:
    end = time.monotonic() + (options.timeout or math.inf)
    inherited = os.environ | {
        "JAXCOMM_MAX_RESTARTS": str(options.max_restarts),
        "JAXCOMM_RUN_ID": uuid.uuid4().hex,
        "JAXCOMM_LAUNCHED": "1",
    }
    watches_nccl = options.watch and not watch.is_of_cpus(options)
    if watches_nccl and (why := watch.refusal(inherited)):
        _say(why)
        return WRONG_USE
    if options.watch and not watches_nccl:
        _say(watch.ON_CPUS)
    count = 0
    stores = itertools.count()
    everyone = places = tuple(range(options.processes))
    while True:
        # Processes of one id write files of one name.
        where = records.folder(own)
        if options.max_restarts:
            where /= f"attempt-{count}"
        records.make(where)
        inherited["JAXCOMM_RESTART_COUNT"] = str(count)
        inherited[records.VARIABLE] = str(where)
        if watches_nccl:
            inherited |= watch.variables(where)
        with _address(options, own / f"store-{next(stores)}") as address:
            outcome = _attempt(options, places, address, inherited, end, own, where)
        if _join_without_the_lost(outcome, options):
            _say(
                f"process {outcome.failed} {describe(outcome.status)} before all had "
                f"joined: starting again with {len(outcome.left)} of {len(places)}"
            )
            places = tuple(places[process] for process in outcome.left)
            continue
        goes_on, text = _after(outcome, count, options.max_restarts)
        if text:
            _say(text)
        if not goes_on:
            return outcome.status
        count += 1
        places = everyone


@contextlib.contextmanager
def _address(options: Options, socket: pathlib.Path) -> Iterator[str]:
    """Yield where the job's store is served: on one host, where no other user may."""
    if options.coordinator:
        yield options.coordinator
    elif options.coordinator_port is None:
        yield f"{environment.SOCKET}{socket}"
    else:
        with port.reserved(options.coordinator_port) as number:
            yield f"{environment.LOOPBACK}:{number}"


def _join_without_the_lost(outcome: Outcome, options: Options) -> bool:
    """Return whether enough processes are left of those that had not joined yet.

    JAX would wait for the lost one. Nothing is computed yet.
    """
    return (
        len(outcome.left) >= options.min_processes
        and not outcome.was_asked
        and outcome.status != WRONG_USE
    )


def _after(outcome: Outcome, count: int, most: int) -> tuple[bool, str]:
    """Return whether the job starts again, and what to say."""
    if not outcome.status:
        times = f"{count} restart{'s' if count > 1 else ''}"
        return False, f"done after {times}" if count else ""
    if not most or outcome.was_asked:
        return False, ""
    cause = "no progress"
    if outcome.failed is not None:
        cause = f"process {outcome.failed} {describe(outcome.status)}"
    if outcome.status == WRONG_USE:
        return False, (
            f"not restarted: {cause}, which says that the program was called wrongly. "
            "Correct the call"
        )
    if count == most:
        return False, f"not restarted: {cause}, after all {most} restarts"
    return True, f"restart {count + 1} of {most}: {cause}"


def _attempt(
    options: Options,
    places: tuple[int, ...],
    address: str,
    inherited: dict[str, str],
    end: float,
    own: pathlib.Path,
    where: pathlib.Path,
) -> Outcome:
    """Start the processes and wait for them.

    Args:
      options: what was asked for.
      places: of the processes on this host, which say what GPUs they have.
      address: of the job's store.
      inherited: environment of all processes.
      end: ``time.monotonic()`` at which ``--timeout`` ends the run.
      own: folder of the run.
      where: folder of the attempt's flight records.
    """
    options = dataclasses.replace(options, processes=len(places))
    output = Output(options.prefix)
    report = Report(where, options.total, output)
    store = None
    if options.elastic and options.host == 0:
        if options.coordinator:
            # gRPC would end the launcher by SIGSEGV.
            port.bound(*options.coordinator_address).close()
        store = compat.serve_jobs_store(address, options.total)
    reports_read, reports_write = os.pipe()
    os.set_blocking(reports_read, False)
    processes = []
    signals = Signals()
    ends = Ends(options, output, own)
    try:
        with signals, ends:
            try:

                def start(number: int, again: int = 0) -> Process:
                    more = {"JAXCOMM_STARTS": str(again)} if again else {}
                    variables = environment.of_process(
                        number,
                        options,
                        address,
                        inherited | ends.variables | more,
                        places[number - options.first],
                    )
                    process = Process(
                        number, options, variables, reports_write, output.piped
                    )
                    processes.append(process)
                    return process

                for number in range(options.first, options.first + len(places)):
                    start(number)
                watching = None
                if options.watch:
                    watching = (
                        CpuWatch(options.watch_timeout)
                        if watch.is_of_cpus(options)
                        else NcclWatch(where, options.watch_timeout)
                    )
                if output.piped:
                    output.follow({p.number: p.pipes() for p in processes})
                witness = Witness({p.number: p for p in processes}, where)
                job = Job(
                    tuple(processes),
                    start,
                    reports_read,
                    options,
                    end,
                    signals,
                    output,
                    ends,
                    witness,
                    report,
                    watching,
                )
                outcome = job.wait()
                if outcome.status and not report.is_made:
                    report.blame(witness.seen())
                if not outcome.status and not report.is_made:
                    report.name_the_slow()
                    if own in where.parents:
                        report.drop_those_that_ended_well()
                ends.wait_for_others(
                    lambda: signals.are_left() or time.monotonic() > end
                )
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
