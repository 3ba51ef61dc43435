"""What comes next, if programs repeat themselves."""

import pytest

from jaxcomm.diagnostics import habits


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("abcabcabcabc", ("a", 3)),
        ("abcabcabcab", ("c", 3)),
        # Twice is no habit, nor is what came only now and then.
        ("abcabcabc", ("", 0)),
        ("abacadaea", ("", 0)),
        # An evaluation after every third step: the longer past tells more.
        ("ababababe" * 4, ("a", 3)),
        ("ababababe" * 4 + "abababab", ("e", 3)),
        ("", ("", 0)),
        ("a", ("", 0)),
        ("aaaa", ("a", 3)),
    ],
)
def test_what_comes_next_if_it_always_did(before, expected):
    assert habits.expected_after([*before]) == expected
