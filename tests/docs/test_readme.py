"""Every Python block of the README and of the pages runs, and prints what it says."""

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


def blocks(page):
    text = page.read_text()
    return [
        {"line": text.count("\n", 0, match.start("code")), **match.groupdict()}
        for match in BLOCK.finditer(text)
    ]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CASES = [
    pytest.param(page, i, id=f"{page.name}:{block['line'] + 1}")
    for page in PAGES
    for i, block in enumerate(blocks(page))
]


def start(words, **options):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Pages choose how many CPU devices they have.
    own = os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]}
    words = [sys.executable, *words]
    return forked.Popen(words, text=True, env=own, **pipes, **options)


@pytest.fixture(scope="module")
def outcomes():
    """Gives ``outcomes(page)``; each page runs once, in a process of its own."""
    known = {}

    def of(page):
        if page not in known:
            request = {"page": str(page), "blocks": [
                {"line": b["line"], "code": b["code"]} for b in blocks(page)
            ]}  # fmt: skip
            process = start([str(RUN_BLOCKS)])
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
def test_the_launcher_reports_what_the_readme_says(tmp_path):
    """Of process 1 that calls ``pmax`` where process 0 calls ``psum``."""
    (tmp_path / "train.py").write_text(
        "import jax, jaxcomm, numpy\n"
        "mesh = jax.make_mesh((2,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "call = (jaxcomm.psum, jaxcomm.pmax)[jax.process_index()]\n"
        "ones, split = numpy.ones((2, 4), 'f'), jax.NamedSharding(mesh, jax.P('i'))\n"
        "x = jax.make_array_from_callback((2, 4), split, lambda i: ones[i])\n"
        "print(jax.jit(jax.shard_map(lambda x: call(x, 'i'), in_specs=jax.P('i'),"
        " out_specs=jax.P(), mesh=mesh))(x))\n"
    )
    process = start([*forked.LAUNCH, "-n", "2", "train.py"], cwd=tmp_path)
    _, err = waiting.ended(process)
    (shown,) = re.findall(r"^jaxcomm.launch: .*$", PAGES[0].read_text(), re.M)
    # Of two that differ the later is named, here either.
    before, one, other = re.fullmatch(r"(.* at #1 )(.*) where (.*)", shown).groups()
    assert {shown, f"{before}{other} where {one}"} & {*err.splitlines()}
    assert err.splitlines()[0].startswith("jaxcomm.launch: suspect: process ")
