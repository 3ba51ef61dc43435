import os
import signal

import pytest

from language_model import __main__ as demo
from language_model import report
from language_model.training import Training

SMALL = ("--sequence=61", "--layers=1", "--width=16", "--data=2", "--context=2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(999)))
    return path


@pytest.mark.slow
def test_trains_and_checks_and_goes_on_after_ctrl_c_to_draw_and_write(
    text, tmp_path, monkeypatch, capsys
):
    advance = Training.advance

    def interrupted_in_step_3(self):
        if len(self.losses) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(Training, "advance", interrupted_in_step_3)
    output = tmp_path / "output"
    words = [*SMALL, "--steps=3", f"--text={text}", f"--output={output}"]
    assert demo.main(words) == 130
    out, err = capsys.readouterr()
    for said in (
        "data=2 x context=2 cpu devices, sequences of 61 bytes in zigzag order",
        "0 collectives of XLA",
        "allowed 1.0e-04: equal",
        "step 3/3  loss",
    ):
        assert said in out
    assert f"demo: interrupted; step 3 is saved in {output / 'checkpoints'}" in err
    assert "Go on: python -m language_model --sequence=61" in err
    assert err.rstrip().endswith("--resume")
    assert (output / "checkpoints" / "3").is_dir()
    # It was the last step: what is left are the results.
    assert demo.main([*words, "--resume"]) == 0
    out = capsys.readouterr().out
    for said in (
        "the model goes on\n  | ",
        "data x context  default  host     4     1",
        "collective calls were handed",
        *(f"\n  {phase} " for phase in ("compile", "training", "generation", "total")),
    ):
        assert said in out
    assert (output / "loss.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices=8", "--context=3"], "--devices=8 and --context=3: 8 devices are"),
        (["--data=2", "--context=1", "--microbatches=12"],
         "--microbatches=12 on --data=2 devices: each must have as many, and a power "
         "of two of them. Choose 2 times 1, 2, 4"),
        (["--sequence=0"], "--sequence: '0' is not a number from 1 on"),
        (["--colour=red"], "unrecognized arguments: --colour=red"),
        (["--devices=16"], "16 devices were asked for, but jax runs with 8"),
        (["--sequence=100000000"], "too few for --sequence=100000000; pass"),
        (["--resume"], "--resume: no checkpoint in"),
        (["--output=text.txt"], "--output=text.txt cannot be written: File exists"),
        (["--output=taken"], "--output=taken cannot be written: loss.png is a folder "
         "there; name another folder"),
        (["--text=no.txt"], "--text=no.txt cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_refuses_with_one_line(capsys, monkeypatch, text, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PJRT_NPROC", "32")  # else --microbatches sets it
    (tmp_path / "taken" / "loss.png").mkdir(parents=True)
    assert demo.main(["--text", text.name, "--sequence=64", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("demo: ")
    assert err.count("\n") == 1
    assert message in err


def test_losses_that_differ_from_one_device_are_status_1(
    capsys, monkeypatch, text, tmp_path
):
    losses = iter([5.5, 5.4])
    monkeypatch.setattr(Training, "compile", lambda self: "")
    monkeypatch.setattr(Training, "advance", lambda self: self.losses.append(5.5))
    monkeypatch.setattr(Training, "reference_losses", lambda self, n: [*losses])
    monkeypatch.setattr(report.TrainingProgress, "update", lambda *_: None)
    monkeypatch.setattr(Training, "agree", lambda self, flag: flag)
    assert demo.main([*SMALL, f"--text={text}", f"--output={tmp_path}/output"]) == 1
    assert (
        "demo: the losses on the mesh differ from those on one device by 1.0e-01"
        in capsys.readouterr().err
    )
