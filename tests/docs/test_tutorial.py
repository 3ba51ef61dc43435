"""The tutorial shows what each of its programs changes, and what they print."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import waiting

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "tutorial", ROOT / "tools" / "tutorial.py"
)
tutorial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorial)
PAGE = tutorial.PAGE.read_text()
COMMAND = re.compile(
    r"^```sh\npython ([^\n]*(step\d_\w+)\.py)\n```\n.*?^```\n(.*?)^```", re.M | re.S
)
COMMANDS = {match[2]: (match[1].split(), match[3]) for match in COMMAND.finditer(PAGE)}
# It has the lines of those before it but the first's attention. What the later ones
# add, tests/examples run.
QUICK = {"step5_three_axes"}


def test_the_page_shows_what_each_step_changes_and_runs_all():
    assert tutorial.with_changes(PAGE) == PAGE, "run python tools/tutorial.py"
    assert list(COMMANDS) == [path.stem for path in tutorial.STEPS]


def words(text):
    """Return words and numbers; losses in the last digit are those of a machine."""
    text = re.sub(r"\S+ [KM]iB +live", "# live", text)
    return [
        pytest.approx(float(word), abs=2e-3) if "." in word else word
        for word in re.findall(r"\d+\.\d+|\w+|\S", text)
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK))
        for name in COMMANDS
    ],
)
def test_a_step_prints_what_the_page_says(name, compiled_once):
    pytest.importorskip("flax")
    command, printed = COMMANDS[name]
    process = forked.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT / "examples" / "tutorial",
        # The programs choose how many CPU devices they have.
        env=os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]} | compiled_once,
    )
    try:
        # Four processes compile on a few busy cores.
        out, err = process.communicate(timeout=2 * waiting.HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert words(out) == words(printed)
    if name == "step8_survive":
        assert "jaxcomm.launch: suspect: process 3 (pid" in err
