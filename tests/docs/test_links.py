"""Links between pages, and files that pages name, exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ["ffi", "jaxcomm", "tests", "benchmarks", "examples", "tools", "docs"]
FILES = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.*")}
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def links(text):
    """Return the targets of a page's links, those to other sites left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken(page):
    """Return the links of a page that lead nowhere."""
    text = page.read_text()
    found = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken(page) == []


def missing(page):
    """Return the source files that a page names and that do not exist."""
    text = FENCE.sub("", page.read_text())
    paths = re.findall(rf"`((?:{'|'.join(SOURCES)})/[\w./-]+)`", text)
    names = re.findall(r"`(\w+\.(?:cc|h|cu|py))`", text)
    return [path for path in paths if not (ROOT / path).exists()] + [
        name for name in names if name not in FILES
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    assert missing(page) == []


def test_missing_files_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`ffi/core/plan.h` `ffi/no.h` `plan.h` `no.cc` `tools/no`")
    assert missing(page) == ["ffi/no.h", "tools/no", "no.cc"]


def test_every_page_is_linked():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in links(page.read_text())
    }
    contents = (ROOT / "docs" / "contents.md").read_text()
    linked |= {ROOT / f"{page}.md" for page in re.findall(r"^docs/\S+", contents, re.M)}
    linked.add(ROOT / "docs" / "contents.md")
    assert [p.name for p in PAGES if p not in linked and p.name != "README.md"] == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# It's `a` title\n[1](#its-a-title) [2](#no) [3](no.md) [4](page.md#x)"
    )
    assert broken(page) == ["#no", "no.md", "page.md#x"]
