"""The page of what attention supports and refuses is what the code says."""

import pathlib

import pytest
from refusals import REFUSALS, attend
from supported import page

from jaxcomm.attention import Ulysses

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "supported.md"


@pytest.mark.thorough
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


def test_another_strategy_for_a_few_heads_is_possible():
    """What the errors advise."""
    attend(strategy=Ulysses(2))
    attend(strategy="auto")
