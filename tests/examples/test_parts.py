"""Ctrl-C wherever it comes, the split of devices, and what a run prints."""

import os
import signal
import sys

import numpy as np
import pytest

from language_model import report
from language_model.interrupt import deferred_interrupt, kept_interrupt
from language_model.settings import split_devices


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


class Finalized:
    """Is interrupted where Python drops what is raised."""

    def __del__(self):
        press_ctrl_c()


@kept_interrupt()
def do(*steps):
    for step in steps:
        step()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_raised_at_once_or_at_the_end_if_python_dropped_it():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        do(press_ctrl_c, lambda: reached.append("on"))
    assert not reached
    with pytest.raises(KeyboardInterrupt):
        do(lambda: Finalized() and None, lambda: reached.append("on"))
    assert reached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_that_follows_does_not_hide_ctrl_c():
    def fail():
        raise ValueError("left undone")

    with pytest.raises(KeyboardInterrupt) as raised:
        do(lambda: Finalized() and None, fail)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="left undone"):
        do(fail)


@pytest.mark.parametrize("context", [kept_interrupt, deferred_interrupt])
def test_the_handler_before_is_there_again_and_who_ignores_it_goes_on(context):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with context():
            press_ctrl_c()
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    with context():
        assert signal.getsignal(signal.SIGINT) is not previous
    assert signal.getsignal(signal.SIGINT) is previous


def test_during_training_ctrl_c_is_noted_and_raised_the_second_time():
    with deferred_interrupt() as was_pressed:
        assert not was_pressed()
        press_ctrl_c()
        assert was_pressed()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


@pytest.mark.parametrize(
    ("asked", "mesh"),
    [
        ((None, None, None), (2, 4)),
        ((2, None, None), (1, 2)),
        ((6, None, None), (2, 3)),
        ((5, None, None), (1, 5)),
        ((8, 4, None), (4, 2)),
        ((8, None, 8), (1, 8)),
        ((None, 3, 2), (3, 2)),
    ],
)
def test_splits_devices_into_batch_and_ring(asked, mesh):
    assert split_devices(*asked) == mesh


def test_a_log_gets_a_dozen_lines_and_the_first_of_a_resumed_run(capsys):
    with report.TrainingProgress(0, 1000, 8192) as progress:
        for done in range(1, 1001):
            progress.update(done, 5.5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("step 1/1000  loss 5.500  ")
    assert lines[-1].startswith("step 1000/1000  loss 5.500  ")
    assert lines[-1].endswith("0 s left")
    with report.TrainingProgress(33, 100, 8192) as progress:
        progress.update(34, 2.5)
    assert capsys.readouterr().out.startswith("step 34/100  loss 2.500")


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with report.TrainingProgress(0, 3, 8192) as progress:
        progress.update(3, 5.5)
    out = capsys.readouterr().out
    assert all(said in out for said in ("3/3", "loss 5.500", "tokens/s"))


@pytest.mark.parametrize(
    ("loss", "said"),
    [(5.40001, "equal"), (5.4002, "NOT EQUAL"), (np.nan, "NOT EQUAL")],
)
def test_losses_are_compared_step_by_step(loss, said):
    table = report.comparison_table([5.5, loss], [5.5, 5.4], 20, 1e-4)
    assert "    22 " in table
    assert f"allowed 1.0e-04: {said}" in table
