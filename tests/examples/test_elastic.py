"""Training that loses processes and goes on in place, to the bits of a run that did."""

import dataclasses
import os
import pathlib
import random
import re

import forked
import jax
import numpy as np
import pytest

from language_model import data, processes
from language_model.settings import Settings
from language_model.training import Training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(1800)]
PROGRAM = pathlib.Path(__file__).with_name("elastic_demo.py")
SMALL = "--sequence=61", "--layers=1", "--width=16"
STEPS = 9


def run(folder, kills, processes, context):
    """Returns the losses, and the points (steps, data) it went on from."""
    process = folder.start(
        *(*forked.LAUNCH, f"-n{processes}"),
        *(f"--devices-per-process={context}", "--elastic", "--min-processes=2"),
        *(str(PROGRAM), *SMALL, "--elastic", f"--context={context}"),
        *(f"--steps={STEPS}", "--checkpoint_every=3", "--output=elastic"),
        JAXCOMM_TEST_KILLS=",".join(kills),
    )
    out, err = folder.ended(process)
    assert process.returncode == 0, f"{kills}\n{out}\n{err}"
    points = re.findall(r"\[(\d)\] after (\d+) with (\d)", out)
    last = max(points)[0]
    points = [(int(step), int(rows)) for who, step, rows in points if who == last]
    (losses,) = re.findall(r"losses (.*)", out)
    return [float.fromhex(each) for each in losses.split()], points


def undisturbed(folder, points, rows, context):
    """Returns the losses of runs in this process, each from where one before it is."""
    settings = Settings(
        data=rows, context=context, sequence=61, layers=1, width=16, steps=STEPS,
        text=folder.path / "text.txt", output=folder.path / "none",
    )  # fmt: skip
    text = data.load(settings.text, settings.sequence)
    training = Training(settings, text)
    for step, rows in points:
        while len(training.losses) < step:
            training.advance()
        smaller = Training(dataclasses.replace(settings, data=rows), text)
        state = jax.tree.map(np.asarray, training.state)
        smaller.state = processes.put(state, smaller._program.replicated)
        smaller.losses = training.losses
        training = smaller
    while len(training.losses) < STEPS:
        training.advance()
    return training.losses


def test_process_0_is_killed_and_another_is_late_once(folder):
    """Nobody is lost by the lateness, and no clock says who is late."""
    kills = ["0 save 2 60", "1 advance 2 late", "2 advance 2 impatient"]
    losses, points = run(folder, kills, 3, 1)
    rows = [rows for _, rows in points]
    assert list(dict.fromkeys(rows)) == [3, 2]
    assert losses == undisturbed(folder, points, 3, 1)


PHASES = {"advance": STEPS - 1, "compile": 1, "save": 3, "agree": STEPS - 1}


@pytest.mark.thorough
def test_any_process_is_killed_at_any_moment(folder):
    draw = random.Random(int(os.environ.get("JAXCOMM_TEST_SEED", "0")))
    for _ in range(20):
        first, second = draw.sample(range(4), 2)
        phase = draw.choice([*PHASES])
        time, call = draw.randint(1, PHASES[phase]), draw.randint(1, 2000)
        kills = [f"{first} {phase} {time} {call}"]
        if draw.random() < 0.3:
            kills.append(f"{second} shrink 1 {draw.randint(1, 300)}")
        losses, points = run(folder, kills, 4, 2)
        print(kills, points, flush=True)
        assert losses == undisturbed(folder, points, 4, 2), kills
