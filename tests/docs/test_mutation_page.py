"""tools/mutation writes docs/mutation.md in the form that is checked in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mutation.md").read_text()
ENTRY = re.compile(
    r"^\* `(?P<file>[^`]+)`\n  \* `(?P<source>[^`]+)`\n  \* `(?P<old>[^`]+)` became "
    r"`(?P<new>[^`]+)`\n",
    re.M,
)


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from mutation import report

    return report


def test_the_page_is_as_the_tool_writes_it(report):
    tried = []
    for entry in ENTRY.finditer(PAGE):
        known = {key: entry[key] for key in ("file", "source", "old", "new")}
        fields = dict.fromkeys(report.Defect.__dataclass_fields__, 0) | known
        tried.append((report.Defect(**fields), {"outcome": "survived"}))
    assert len(tried) > 3
    written, _ = report.page(tried, drawn=200, seed=0)
    listed = "## Survivors"
    assert written[written.index(listed) :] == PAGE[PAGE.index(listed) :]
