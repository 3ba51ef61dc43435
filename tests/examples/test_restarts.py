"""Training in several processes that are killed or interrupted."""

import json
import pathlib
import re
import signal

import forked
import pytest
import waiting

from language_model import data
from language_model.settings import Settings
from language_model.training import Training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = "--sequence=61", "--layers=1", "--width=16", "--nocheck"
PROGRAM = pathlib.Path(__file__).with_name("dying_demo.py")


def test_killed_processes_change_nothing(folder):
    process = folder.start(
        *(*forked.LAUNCH, "-n2", "--max-restarts=10", "--grace=0.3"),
        *(str(PROGRAM), *SMALL, "--steps=9", "--checkpoint_every=3"),
        *("--data=2", "--context=1", "--output=disturbed"),
    )
    out, err = folder.ended(process)
    assert process.returncode == 0, err
    assert err.count("was ended by SIGKILL; stopping the others") == 1
    assert "jaxcomm.launch: done after 1 restart" in err
    assert out.count("goes on after step") == out.count("goes on after step 3\n") == 1
    assert "on text held out" in out
    assert (folder.path / "half-written").exists()
    saved = folder.path / "disturbed" / "checkpoints"
    assert not [path for path in saved.iterdir() if "tmp" in path.name]
    # As in one process that nobody kills.
    settings = Settings(
        data=2, context=1, sequence=61, layers=1, width=16, steps=9,
        text=folder.path / "text.txt", output=folder.path / "none",
    )  # fmt: skip
    training = Training(settings, data.load(settings.text, settings.sequence))
    expected = [training.advance() for _ in range(9)]
    metadata = json.loads((saved / "9" / "about" / "metadata").read_text())
    assert metadata["losses"] == expected


@pytest.mark.thorough
def test_ctrl_c_ends_all_after_the_same_step(folder):
    process = folder.start(
        # For saving a checkpoint.
        *(*forked.LAUNCH, "-n2", f"--grace={waiting.HANG_SECONDS:g}"),
        *("-m", "language_model", *SMALL, "--steps=1000000", "--output=stopped"),
    )
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
