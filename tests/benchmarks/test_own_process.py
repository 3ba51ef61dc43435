import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import pathlib
import re
import signal
import threading

import pytest

from bench import options, plan, run
from bench.own_process import Processes


@pytest.fixture
def asked():
    line = ("all", "--quick", "--repeats", "2", "--devices", "2")
    return options.read(line)


@pytest.fixture
def processes(asked):
    with Processes(asked) as processes:
        yield processes
    assert multiprocessing.active_children() == []


@pytest.fixture
def chain_index(asked):
    (index,) = (i for i, case in enumerate(plan.cases(asked)) if case.suite == "chain")
    return index


def test_what_is_timed_on_devices_goes_to_a_process_of_its_own(asked, processes):
    ours, cases = processes.cases(), list(plan.cases(asked))
    assert [(case.suite, case.name, case.target) for case in ours] == [
        (case.suite, case.name, case.target) for case in cases
    ]
    pairs = zip(ours, cases, strict=True)
    stay = {case.suite for case, same in pairs if type(case) is type(same)}
    assert stay == {"memory", "processes"}


def test_the_process_has_just_the_devices_that_take_part(processes, chain_index):
    (row,) = processes.measure(chain_index, 2)
    assert (row.kind, row.suite, row.devices) == ("timed", "chain", 2)
    # With one device there is no mesh of two.
    (row,) = processes.measure(chain_index, 1)
    assert row.kind == "failed"
    assert "(2,)" in row.error


def test_a_process_that_was_killed_costs_one_row(processes, chain_index, session):
    case = processes.cases()[chain_index]
    run.measure(case, session)
    (child,) = multiprocessing.active_children()
    child.kill()
    child.join()
    (row,) = run.measure(case, session)
    assert row.error == "RuntimeError: the process with 2 devices ended with status -9"
    (row,) = run.measure(case, session)
    assert row.kind == "timed"


def test_ctrl_c_is_kept_from_the_process(processes, chain_index):
    processes.measure(chain_index, 2)
    (child,) = multiprocessing.active_children()
    status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", status)
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1


def test_an_interrupt_waits_until_the_process_is_started(
    processes, chain_index, monkeypatch
):
    # Python starts its own process in the same way, if this test is the first.
    multiprocessing.resource_tracker.ensure_running()
    spawn = multiprocessing.util.spawnv_passfds

    def press_ctrl_c():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    def spawn_interrupted(*arguments):
        child = spawn(*arguments)
        # As one of XLA's threads would take it, whatever the main thread blocks.
        thread = threading.Thread(target=press_ctrl_c)
        thread.start()
        thread.join()
        return child

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawn_interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.measure(chain_index, 2)
    assert len(multiprocessing.active_children()) == 1
    monkeypatch.undo()
    (row,) = processes.measure(chain_index, 2)
    assert row.kind == "timed"
