"""Links between pages, and files that pages name, exist.

The site, which test_site.py builds, has its own look at links. This needs no Sphinx,
and knows pages that are not on the site.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# That of the defects is of the tree it was written on: `make mutation` takes long.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests" / "README.md",
    *sorted(each for each in (ROOT / "docs").rglob("*.md") if each.stem != "mutation"),
]
SOURCES = ["ffi", "jaxcomm", "tests", "benchmarks", "examples", "tools", "docs"]
NAMES = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*")}
NAMES |= {path.name for path in ROOT.iterdir()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(text):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken(page):
    whole = page.read_text()
    text = FENCE.sub("", whole)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    found = []
    for target in (each for each in targets if not re.match(r"[a-z]+:", each)):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to.read_text())):
            found.append(target)
    paths = re.findall(rf"`((?:{'|'.join(SOURCES)})/[\w./*-]+)`", text)
    for path in paths:
        places = [at.glob(path.rstrip("/")) for at in (ROOT, page.parent)]
        found += [] if any(map(any, places)) else [path]
    names = re.findall(r"`(\w+\.(?:cc|h|cu|py))`", text)
    # Of the folders, as CONTRIBUTING lists them.
    for listed in re.findall(r"^```\n(jaxcomm/ .*?)^```", whole, re.M | re.S):
        names += re.findall(r"([\w-]+\.(?:py|md|svg))\b|\b(\w+)/", listed)
    names = ["".join(name) for name in names]
    called = re.findall(r"(?:^|`)make ([a-z-]+)", whole, re.M)
    missing = [f"make {target}" for target in called if target not in TARGETS]
    return found + missing + [name for name in names if name not in NAMES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_and_names_exists(page):
    assert broken(page) == []
