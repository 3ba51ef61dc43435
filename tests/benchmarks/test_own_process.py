"""Cases are measured in processes with just the devices that take part."""

import multiprocessing
import pathlib
import re
import signal

import pytest

from bench import options, run
from bench.own_process import Processes


@pytest.fixture
def asked():
    return options.read(("all", "--quick", "--repeats", "2", "--devices", "2"))


@pytest.fixture
def processes(asked):
    with Processes(asked) as processes:
        yield processes
    assert multiprocessing.active_children() == []


def test_a_process_that_was_killed_costs_one_row(processes, session):
    # The dispatch floor, of which little is compiled.
    cases = enumerate(processes.cases())
    index, case = next((i, case) for i, case in cases if "floor" in case.name)
    (row,) = run.measure(case, session)
    assert (row.kind, row.suite, row.devices) == ("timed", "collectives", 2)
    (child,) = multiprocessing.active_children()
    # Ctrl-C is kept from it.
    status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", status)
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    child.kill()
    child.join()
    (row,) = run.measure(case, session)
    assert row.error == "RuntimeError: the process with 2 devices ended with status -9"
    # In the next one, with one device, there is no mesh of two.
    (row,) = processes.measure(index, 1)
    assert row.kind == "failed"
    assert "(2,)" in row.error
