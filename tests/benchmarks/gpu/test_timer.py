"""What the timer makes of times and of what several processes found."""

import dataclasses

import jax
import numpy as np
import pytest
import waiting

from bench.gpu import timer as timer_module
from bench.gpu.timer import Timer


@pytest.fixture
def clock(monkeypatch):
    """Gives ``clock(seconds, slow=0)``: a thunk that takes as long; counts its calls.

    The first of them, as many as are slow, take ten times as long.
    """
    now = waiting.Clock(0.0)
    monkeypatch.setattr(timer_module, "time", now)

    def takes(seconds, slow=0):
        def call():
            call.count += 1
            now.advance(seconds * (10 if call.count <= slow else 1))
            return np.zeros(1)

        call.count = 0
        return call

    return takes


@pytest.fixture
def pair(timer):
    """A timer with more rounds."""
    sizes = dataclasses.replace(timer.sizes, rounds=3, calls=4)
    return dataclasses.replace(timer, sizes=sizes)


def test_a_ratio_is_of_theirs_or_a_share_of_it_to_ours(clock, pair):
    for share, theirs, ratio, is_met in ((1, 3.0, 1.5, True), (0.5, 1.5, 0.75, False)):
        figure = pair.compare("x", clock(2.0), "y", clock(3.0), least=1.2, share=share)
        assert (figure.ours, figure.theirs, figure.ratio) == (2.0, theirs, ratio)
        assert figure.is_met is is_met


def test_the_first_round_warms_up(clock, timer):
    # One call, and the two of a round.
    figure = timer.compare("x", clock(2.0, slow=3), "y", clock(3.0, slow=3))
    assert (figure.ours, figure.theirs) == (2.0, 3.0)


def test_what_the_first_does_alone_the_others_wait_for(clock, pair, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    ours, theirs = clock(2.0), clock(3.0)
    pair.compare("x", ours, "y", theirs, alone=True)
    assert (ours.count, theirs.count) == (4 * 5, 0)


def test_what_is_wrong_in_one_process_is_wrong(timer, monkeypatch):
    for answers, expected in (
        ([["fine", True], ["as well", True]], ("fine", True)),
        ([["fine", True], ["2 lost", False]], ("process 1: 2 lost", False)),
        ([["1 lost", False], ["2 lost", False]], ("1 lost", False)),
        ([["so", None], ["so so", None]], ("so", None)),
    ):
        monkeypatch.setattr(Timer, "agree", lambda self, value, all=answers: all)
        finding = timer.finding("x", *answers[0], number=3)
        assert (finding.found, finding.is_right) == expected
        assert finding.values == {"number": 3}
