"""Ctrl-C in the demo, wherever it comes."""

import os
import signal

import pytest

from language_model.interrupt import deferred_interrupt, kept_interrupt


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


def test_it_is_raised_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        do(press_ctrl_c, lambda: reached.append("on"))
    assert not reached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_dropped_is_raised_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        do(lambda: Finalized() and None, lambda: reached.append("on"))
    assert reached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_that_follows_does_not_hide_it():
    def fail():
        raise ValueError("left undone")

    with pytest.raises(KeyboardInterrupt) as raised:
        do(lambda: Finalized() and None, fail)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="left undone"):
        do(fail)


@pytest.mark.parametrize("context", [kept_interrupt, deferred_interrupt])
def test_who_ignores_it_goes_on_ignoring_it(context):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with context():
            press_ctrl_c()
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_during_training_it_is_noted_and_raised_the_second_time():
    with deferred_interrupt() as was_pressed:
        assert not was_pressed()
        press_ctrl_c()
        assert was_pressed()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


@pytest.mark.parametrize("context", [kept_interrupt, deferred_interrupt])
def test_the_handler_before_is_there_again(context):
    before = signal.getsignal(signal.SIGINT)
    with context():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
