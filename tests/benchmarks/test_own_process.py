"""Cases are measured in processes with just the devices that take part."""

import multiprocessing
import pathlib
import re
import signal

import pytest

from bench import options, plan, run
from bench.own_process import Processes


@pytest.fixture
def asked():
    return options.read(("all", "--quick", "--repeats", "2", "--devices", "2"))


@pytest.fixture
def processes(asked):
    with Processes(asked) as processes:
        yield processes
    assert multiprocessing.active_children() == []


@pytest.fixture
def index(asked):
    """The dispatch floor, of which little is compiled."""
    return next(i for i, case in enumerate(plan.cases(asked)) if "floor" in case.name)


def test_what_is_timed_on_devices_goes_to_a_process_of_its_own(asked, processes):
    ours, cases = processes.cases(), list(plan.cases(asked))
    assert [(case.suite, case.name, case.target) for case in ours] == [
        (case.suite, case.name, case.target) for case in cases
    ]
    pairs = zip(ours, cases, strict=True)
    stay = {case.suite for case, same in pairs if type(case) is type(same)}
    assert stay == {"memory", "processes"}


def test_a_process_that_was_killed_costs_one_row(processes, index, session):
    case = processes.cases()[index]
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
