"""A command of a page that is followed by its output runs, and prints that.

The Python block before the command is saved under the name that the command ends in.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"^```sh\n(?P<command>python -m [^\n]+)\n```\n\n```\n(?P<output>.*?)^```$",
    re.M | re.S,
)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def commands(page):
    """Yield the code, command and output of each such block of a page."""
    text = page.read_text()
    for match in COMMAND.finditer(text):
        code = PYTHON.findall(text[: match.start()])[-1]
        yield code, match["command"], match["output"]


CASES = [
    pytest.param(*found, id=page.name)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for found in commands(page)
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("code", "command", "output"), CASES)
def test_a_command_prints_what_the_page_says(code, command, output, tmp_path):
    words = command.split()
    (tmp_path / words[-1]).write_text(code)
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # Processes print in any order.
    assert sorted(done.stdout.splitlines()) == sorted(output.splitlines())


def test_the_pages_have_such_commands():
    assert len(CASES) >= 1
