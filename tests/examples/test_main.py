import os
import re
import signal
import subprocess
import sys
import time

import forked
import pytest

from language_model import __main__ as demo
from language_model import run as run_module

SMALL = ("--sequence=61", "--layers=1", "--width=16", "--data=2", "--context=2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(999)))
    return path


@pytest.fixture
def command_line(capsys):
    """Returns ``call(*flags) -> (exit status, stderr)``, inside this process."""

    def call(*arguments):
        status = demo.main([str(each) for each in arguments])
        return status, capsys.readouterr().err

    return call


def start(*arguments, cwd, program=None, **variables):
    # Its own number of devices.
    environment = os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]}
    which = ("-c", program) if program else ("-m", "language_model")
    return forked.Popen(
        [sys.executable, *which, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment | variables,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trains_checks_saves_draws_and_writes(text, tmp_path, compiled_once):
    arguments = (*SMALL, "--steps=4", f"--text={text}")
    process = start(*arguments, cwd=tmp_path, **compiled_once)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert (
        "data=2 x context=2 cpu devices, sequences of 61 bytes in zigzag order" in out
    )
    assert "0 collectives of XLA" in out
    assert "step 4/4  loss" in out
    assert "allowed 1.0e-04: equal" in out
    assert "data x context  default  host     4     1" in out
    assert "collective calls were handed" in out
    assert "the model goes on\n  | " in out
    for phase in ("compile", "reference", "training", "generation", "total"):
        assert f"\n  {phase} " in out
    curve = tmp_path / "demo_output" / "loss.png"
    assert curve.stat().st_size > 5_000
    assert (tmp_path / "demo_output" / "checkpoints" / "4").is_dir()
    # As after Ctrl-C in the last step: what is left are the results.
    curve.unlink()
    process = start(*arguments, "--resume", cwd=tmp_path, **compiled_once)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "the model goes on\n  | " in out
    assert curve.exists()


def test_results_that_could_not_be_kept_are_refused_at_the_start(
    command_line, text, tmp_path
):
    output = tmp_path / "output"
    (output / "loss.png").mkdir(parents=True)
    status, err = command_line("--text", text, "--sequence=64", "--output", output)
    assert (status, err) == (
        2,
        f"demo: --output={output} cannot be written: loss.png is a folder there; name "
        "another folder\n",
    )
    (output / "checkpoints").rmdir()
    (output / "checkpoints").touch()
    status, err = command_line("--text", text, "--sequence=64", "--output", output)
    assert status == 2
    assert "cannot be written: File exists" in err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(text, tmp_path, compiled_once):
    arguments = (*SMALL, "--nocheck", "--steps=1000000", f"--text={text}")
    process = start(*arguments, cwd=tmp_path, **compiled_once)
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step 1/") for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "demo: interrupted; step" in err
    assert "Go on: python -m language_model" in err
    assert err.rstrip().endswith("--resume")
    step = re.search(r"step (\d+) is saved", err)[1]
    assert (tmp_path / "demo_output" / "checkpoints" / step).is_dir()


@pytest.mark.multiprocess
def test_a_mistake_ends_the_process_with_one_line_and_status_2(tmp_path):
    process = start("--text", tmp_path / "missing.txt", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    path = tmp_path / "missing.txt"
    assert err == f"demo: --text={path} cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence=0"], "--sequence: '0' is not a number from 1 on"),
        (["--sequence=many"], "--sequence: 'many' is not a number"),
        (["--steps=0"], "--steps: '0' is not"),
        (["--devices=0"], "--devices: '0' is not a number 1 to 256"),
        (["--devices=8", "--context=3"], "--devices=8 and --context=3: 8 devices"),
        (["--schedule=spiral"], "--schedule: invalid choice: 'spiral' (choose from "),
        (["--backend=pigeon"], "--backend: invalid choice: 'pigeon' (choose from "),
        (["--width=12"], "--width=12 is not a multiple of 8"),
        (["--learning_rate=-1"], "--learning_rate=-1.0 is not positive"),
        (["--learning_rate=nan"], "--learning_rate=nan is not positive"),
        (["--seed=9223372036854775808"], "--seed: '9223372036854775808' is not"),
        (["--text="], "--text is empty; name a path, or leave it out"),
        (["--output="], "--output is empty; name a path, or leave it out"),
        (["--text=" + 300 * "x"], "cannot be read: File name too long"),
        (["--colour=red"], "unrecognized arguments: --colour=red"),
        (["more"], "unrecognized arguments: more"),
        (["--devices=16"], "16 devices were asked for, but jax runs with 8"),
        (["--sequence=100000000"], "too few for --sequence=100000000; pass"),
        (["--resume"], "--resume: no checkpoint in"),
        (["--output=text.txt"], "--output=text.txt cannot be written: File exists"),
        (["--output=text.txt/x"], "cannot be written: Not a directory"),
    ],
)  # fmt: skip
def test_refuses_with_one_line(
    command_line, monkeypatch, text, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, err = command_line("--text", text.name, "--sequence=64", *arguments)
    assert status == 2
    assert err.startswith("demo: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.multiprocess
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_not_an_error(flag, tmp_path):
    process = start(flag, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    assert out.startswith("usage: python -m language_model [options]\n")
    assert "\nTrain a small language model with its sequence split over" in out
    for line in ("--sequence SEQUENCE", "--schedule {contiguous,striped,zigzag}"):
        assert f"\n  {line}" in out
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_is_status_1(command_line, monkeypatch):
    def fail(settings):
        raise run_module.CheckFailed("the losses differ")

    monkeypatch.setattr(run_module, "run", fail)
    assert command_line() == (1, "demo: the losses differ\n")


# Compiling does not end before Ctrl-C has come.
COMPILES_ON = """
import signal, sys, time
import jax
from language_model import __main__ as demo
compiled = jax.stages.Lowered.compile
def compile_on(self, *given, **options):
    handler, come = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *about: (come.append(about), handler(*about)))
    found = compiled(self, *given, **options)
    while not come: time.sleep(0.01)
    return found
jax.stages.Lowered.compile = compile_on
sys.exit(demo._main(sys.argv[1:]))
"""


@pytest.mark.multiprocess
def test_ctrl_c_while_xla_compiles_is_status_130_and_no_crash(text, tmp_path):
    dumped = tmp_path / "dumped"
    arguments = (*SMALL, "--nocheck", f"--text={text}")
    # With all optimizations, so that it takes seconds.
    flags = f"--xla_dump_to={dumped}"
    process = start(*arguments, program=COMPILES_ON, cwd=tmp_path, XLA_FLAGS=flags)
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("mesh ") for line in lines)
    # Tracing takes seconds too. XLA names the program that it begins with.
    deadline = time.monotonic() + 120
    while not any(dumped.glob("module_*.jit_train*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    dropped, said, rest = err.partition("demo: interrupted\n")
    assert (said, rest) == ("demo: interrupted\n", "")
    # Python says so of one that comes while an object is destroyed.
    assert not dropped or dropped.startswith("Exception ignored ")
