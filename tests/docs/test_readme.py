"""Every Python block of the README and of the pages runs, and prints what it says.

So does each command that is followed by its output. The Python block before the command
is saved under the name that the command ends in.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import waiting

ROOT = Path(__file__).parents[2]
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")
# A Python block, and the output that follows it, if one does.
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<output>.*?)^```\n)?", re.M | re.S
)
COMMAND = re.compile(
    r"^```sh\n(?P<command>python -m [^\n]+)\n```\n\n```\n(?P<output>.*?)^```$",
    re.M | re.S,
)


def blocks(page):
    text = page.read_text()
    return [
        {"line": text.count("\n", 0, match.start("code")), **match.groupdict()}
        for match in BLOCK.finditer(text)
    ]


def commands(page):
    """Yield the code, command and output of each such block of a page."""
    text = page.read_text()
    for match in COMMAND.finditer(text):
        before = BLOCK.finditer(text[: match.start()])
        yield [each["code"] for each in before][-1], match["command"], match["output"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CASES = [
    pytest.param(page, i, id=f"{page.name}:{block['line'] + 1}")
    for page in PAGES
    for i, block in enumerate(blocks(page))
]
COMMANDS = [
    pytest.param(*found, id=page.name) for page in PAGES for found in commands(page)
]


def start(words, **options):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return forked.Popen([sys.executable, *words], text=True, **pipes, **options)


@pytest.fixture(scope="module")
def outcomes():
    """Gives ``outcomes(page)``; each page runs once, in a process of its own."""
    known = {}

    def of(page):
        if page not in known:
            # Pages choose how many CPU devices they have.
            environment = dict(os.environ, XLA_FLAGS=os.environ["QUICK_XLA_FLAGS"])
            request = {"page": str(page), "blocks": [
                {"line": b["line"], "code": b["code"]} for b in blocks(page)
            ]}  # fmt: skip
            process = start([str(RUN_BLOCKS)], env=environment)
            out, err = waiting.ended(process, json.dumps(request))
            assert process.returncode == 0, err
            known[page] = json.loads(out)
        return known[page]

    return of


def comparable(printed):
    """Drop the memory that a communicator takes, which each build changes a little."""
    return re.sub(r"\S+ (?:Ki)?B +live", "# live", printed).strip()


@pytest.mark.parametrize(("page", "i"), CASES)
def test_a_block_runs_and_prints_what_the_page_says(outcomes, page, i):
    outcome, block = outcomes(page)[i], blocks(page)[i]
    assert outcome["error"] is None, outcome["error"]
    if block["output"] is not None:
        assert comparable(outcome["printed"]) == comparable(block["output"])


@pytest.mark.multiprocess
@pytest.mark.parametrize(("code", "command", "output"), COMMANDS)
def test_a_command_prints_what_the_page_says(code, command, output, tmp_path):
    words = command.split()
    (tmp_path / words[-1]).write_text(code)
    process = start(words[1:], cwd=tmp_path)
    out, err = waiting.ended(process)
    assert process.returncode == 0, err
    # Processes print in any order.
    assert sorted(out.splitlines()) == sorted(output.splitlines())
