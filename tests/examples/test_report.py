import io
import sys

import numpy as np
import pytest

from language_model import plot, report
from language_model.run import CheckFailed, _compare


def test_a_log_gets_a_dozen_lines(capsys):
    with report.TrainingProgress(0, 1000, 8192) as progress:
        for done in range(1, 1001):
            progress.update(done, 5.5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("step 1/1000  loss 5.500  ")
    assert lines[-1].startswith("step 1000/1000  loss 5.500  ")
    assert lines[-1].endswith("0 s left")


def test_a_resumed_run_tells_its_first_step(capsys):
    with report.TrainingProgress(33, 100, 8192) as progress:
        progress.update(34, 2.5)
    assert capsys.readouterr().out.startswith("step 34/100  loss 2.500")


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with report.TrainingProgress(0, 3, 8192) as progress:
        for done in range(1, 4):
            progress.update(done, 5.5)
    assert "3/3" in terminal.getvalue()
    assert "loss 5.500" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_timings_add_up():
    timings = report.Timings()
    with timings.phase("compile"):
        pass
    with timings.phase("train"):
        pass
    names = [line.split()[0] for line in str(timings).splitlines()]
    assert names == ["compile", "train", "total"]


def test_equal_losses_pass(capsys):
    _compare([5.5, 5.4], [5.5, 5.40001], 0)
    assert "allowed 1.0e-04: equal" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [5.4002, np.nan])
def test_different_losses_fail(capsys, loss):
    with pytest.raises(CheckFailed, match="differ from those on one device by"):
        _compare([5.5, loss], [5.5, 5.4], 20)
    out = capsys.readouterr().out
    assert "NOT EQUAL" in out
    assert "    22 " in out


def test_draws_the_loss_curve(tmp_path):
    path = tmp_path / "loss.png"
    plot.plot_losses(path, [5.5, 4.0, 3.0], 3.2)
    assert path.read_bytes().startswith(b"\x89PNG")
