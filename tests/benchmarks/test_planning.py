"""``python -m bench.planning``: predictions beside what was measured in turns."""

import dataclasses
import math

import pytest

from bench import planning


def test_sizes_are_predicted_from_those_beside_them(monkeypatch):
    monkeypatch.setattr(planning, "SIZES", (2048,))
    monkeypatch.setattr(planning, "KNOWN", (1024, 4096))
    found = list(planning.rows(None, 2, rounds=3, passes=2))
    assert [row.name for row in found] == list(planning._OF)
    assert {row.bytes for row in found} == {2048}
    assert all(0 < row.measured < 1 and 0 < row.predicted < 1 for row in found)
    assert "6 cases" in planning.summary(found, 0, math.inf)


@pytest.mark.parametrize(
    ("size", "ratio", "is_good"),
    [(1 << 20, 1.2, True), (1 << 20, 1.3, False), (1024, 1.3, True), (1024, 3, False)],
)
def test_bounds_are_those_of_check(size, ratio, is_good):
    row = planning.Row("psum", size, ratio, 1.0)
    assert row.is_good is is_good
    worse = dataclasses.replace(row, predicted=100.0)
    assert "1 within" in planning.summary([row, worse], 0, math.inf) or not is_good
