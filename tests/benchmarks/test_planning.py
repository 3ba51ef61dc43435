"""``python -m bench.planning``: predictions beside what was measured in turns."""

import math

import pytest

from bench import planning


@pytest.mark.thorough
def test_sizes_are_predicted_from_those_beside_them(monkeypatch):
    monkeypatch.setattr(planning, "SIZES", (2048,))
    monkeypatch.setattr(planning, "KNOWN", (1024, 4096))
    found = list(planning.rows(None, 2, rounds=3, passes=2))
    assert len({row.name for row in found}) == 6
    assert {row.bytes for row in found} == {2048}
    assert all(row.measured > 0 and row.predicted > 0 for row in found)
    assert "6 cases" in planning.summary(found, 0, math.inf)
