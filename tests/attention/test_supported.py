"""The page of what attention supports and refuses is what the code says."""

import ast
import pathlib
import traceback

import pytest
from refusals import REFUSALS, attend
from supported import page

import jaxcomm
from jaxcomm.attention import Ulysses

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "supported.md"
SOURCES = pathlib.Path(jaxcomm.__file__).parent / "attention"


@pytest.mark.slow
def test_the_page_is_current():
    assert PAGE.read_text() == page(), (
        "python tests/support/supported.py > docs/supported.md"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_is_refused_raises(refusal):
    error = refusal.raised()
    assert type(error) is refusal.error, error
    # What was asked or found, and what to do.
    assert len(str(error)) > 30


def _lines_that_raise() -> set[tuple[str, int]]:
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                found.add((str(path), node.lineno))
    return found


def _lines_that_raised(error) -> set[tuple[str, int]]:
    found = set()
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            found.add((frame.filename, frame.lineno))
        error = error.__cause__
    return found


def test_every_raise_of_the_package_is_on_the_page():
    raised = set()
    for refusal in REFUSALS:
        raised |= _lines_that_raised(refusal.raised())
    try:
        attend(implementation="cudnn")
    except ValueError as error:
        raised |= _lines_that_raised(error)
    missing = _lines_that_raise() - raised
    # At run time, when lowered, and of a program: tests/attention/test_positions.py
    # and tests/attention/kernels/test_selection.py.
    later = ("attention/positions.py", "kernels/selection.py", "kernels_of.py")
    missing = {line for line in missing if not line[0].endswith(later)}
    assert not missing


def test_another_strategy_for_a_few_heads_is_possible():
    """What the errors advise."""
    attend(strategy=Ulysses(2))
    attend(strategy="auto")
