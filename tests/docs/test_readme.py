"""Every Python block of the README and of the pages runs, and prints what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")
# A Python block, and the output that follows it, if one does.
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<output>.*?)^```\n)?", re.M | re.S
)


def blocks(page):
    text = page.read_text()
    return [
        {"line": text.count("\n", 0, match.start("code")), **match.groupdict()}
        for match in BLOCK.finditer(text)
    ]


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if blocks(page)
]
CASES = [
    pytest.param(page, i, id=f"{page.name}:{block['line'] + 1}")
    for page in PAGES
    for i, block in enumerate(blocks(page))
]


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
            done = subprocess.run(
                [sys.executable, RUN_BLOCKS],
                input=json.dumps(request),
                env=environment,
                capture_output=True,
                text=True,
                timeout=250,
            )
            assert done.returncode == 0, done.stderr
            known[page] = json.loads(done.stdout)
        return known[page]

    return of


def comparable(printed):
    """Drop the memory that a communicator takes, which each build changes a little."""
    return re.sub(r"\S+ (?:Ki)?B +live", "# live", printed).strip()


@pytest.mark.parametrize(("page", "i"), CASES)
def test_runs_as_printed(outcomes, page, i):
    outcome, block = outcomes(page)[i], blocks(page)[i]
    assert outcome["error"] is None, outcome["error"]
    if block["output"] is not None:
        assert comparable(outcome["printed"]) == comparable(block["output"])


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 150), ("CONTRIBUTING.md", 150)]
)
def test_a_page_is_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_an_output_that_follows_a_block_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n\n```\n2\n```\n\n```python\nx\n```\n\nNo.\n"
    )
    first, second = blocks(page)
    assert (first["line"], first["output"], second["output"]) == (1, "2\n", None)
