"""Training that goes on from its last checkpoint though processes are killed."""

import json
import pathlib

import pytest

from language_model import data
from language_model.settings import Settings
from language_model.training import Training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]
LAUNCHER = ("-m", "jaxcomm.launch", "--max-restarts=10", "--grace=0.3")
PROGRAM = pathlib.Path(__file__).with_name("dying_demo.py")


def train(folder, output, deaths, steps, *options):
    """Return the losses of all steps, and what the program and the launcher said."""
    process = folder.start(
        *LAUNCHER, *options, str(PROGRAM), "--sequence=61", "--layers=1", "--width=16",
        "--nocheck", f"--steps={steps}", "--checkpoint_every=3", f"--output={output}",
        DEATHS=json.dumps(deaths),
    )  # fmt: skip
    out, err = folder.ended(process)
    assert process.returncode == 0, err
    assert "on text held out" in out
    about = folder.path / output / "checkpoints" / str(steps) / "about" / "metadata"
    return json.loads(about.read_text())["losses"], out, err


@pytest.fixture
def undisturbed(folder):
    """Gives ``undisturbed(steps)``: the losses in one process that nobody kills."""

    def of(steps):
        settings = Settings(
            data=1, context=2, sequence=61, layers=1, width=16, steps=steps,
            text=folder.path / "text.txt", output=folder.path / "none",
        )  # fmt: skip
        training = Training(settings, data.load(settings.text, settings.sequence))
        return [training.advance() for _ in range(steps)]

    return of


TWO = [[(0, "half written", 6), (1, "before", 8)]]
TEN = [
    *TWO,
    [(0, "before", 10)],
    [(1, "before", 14)],
    [(0, "half written", 15), (1, "before", 17)],
    [(1, "before", 20)],
    [(0, "half written", 21), (1, "before", 23)],
    [(0, "before", 25)],
]


@pytest.mark.parametrize(
    "deaths", [TWO, pytest.param(TEN, marks=pytest.mark.thorough)], ids=["two", "ten"]
)
def test_killed_processes_change_nothing(folder, undisturbed, deaths):
    steps = 3 * len(deaths) + 6
    output = f"disturbed-{len(deaths)}"
    found, out, err = train(folder, output, deaths, steps, "-n2")
    assert found == undisturbed(steps)
    count = len(deaths)
    assert err.count("was ended by SIGKILL; stopping the others") == count
    assert f"jaxcomm.launch: done after {count} restart" in err
    assert "goes on after step 3\n" in out
    assert out.count("goes on after step") == count
    for attempt, killed in enumerate(deaths):
        half_written = folder.path / f"half-written-{attempt}"
        assert half_written.exists() == (killed[0][1] == "half written")
    left = [path.name for path in folder.path.glob(f"{output}/checkpoints/*")]
    assert not [name for name in left if "tmp" in name]
