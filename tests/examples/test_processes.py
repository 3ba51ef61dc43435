"""The demo in processes of its own: one, and several under the launcher."""

import re
import signal

import pytest
import waiting

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]
LAUNCHER = ("-m", "jaxcomm.launch", "-n", "2")
DEMO = ("-m", "language_model", "--sequence=61", "--layers=1", "--width=16")
MESH = ("--data=2", "--context=2")


def test_ctrl_c_ends_all_after_the_same_step(folder):
    # The program is that of test_restarts.py. The grace is for saving a checkpoint.
    words = (*LAUNCHER, f"--grace={waiting.HANG_SECONDS:g}", *DEMO, "--nocheck")
    process = folder.start(*words, "--steps=1000000", "--output=stopped")
    assert any("step 1/" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = folder.ended(process)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "killed" not in err
    assert err.count("demo: interrupted; step") == 1
    assert "Go on: the same command with --resume" in err
    step = re.search(r"step (\d+) is saved", err)[1]
    assert (folder.path / "stopped" / "checkpoints" / step).is_dir()


# Compiling does not end before Ctrl-C has come.
COMPILES_ON = """
import signal, sys
import jax
import waiting
from language_model import __main__ as demo
compiled = jax.stages.Lowered.compile
def compile_on(self, *given, **options):
    handler, come = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *about: (come.append(about), handler(*about)))
    found = compiled(self, *given, **options)
    waiting.until(lambda: come)
    return found
jax.stages.Lowered.compile = compile_on
sys.exit(demo._main(sys.argv[1:]))
"""


def test_ctrl_c_while_xla_compiles_is_status_130_and_no_crash(folder):
    dumped = folder.path / "dumped"
    process = folder.start(
        "-c", COMPILES_ON, *DEMO[2:], *MESH, "--nocheck", "--output=compiles",
        XLA_FLAGS=f"--xla_dump_to={dumped}",
    )  # fmt: skip
    assert any(line.startswith("mesh ") for line in process.stdout)
    # Tracing takes seconds too. XLA names the program that it begins with.
    waiting.until(lambda: any(dumped.glob("module_*.jit_train*")), "it", process)
    process.send_signal(signal.SIGINT)
    _, err = folder.ended(process)
    assert process.returncode == 130
    dropped, said, rest = err.partition("demo: interrupted\n")
    assert (said, rest) == ("demo: interrupted\n", "")
    # Python says so of one that comes while an object is destroyed.
    assert not dropped or dropped.startswith("Exception ignored ")
