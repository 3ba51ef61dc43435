import pytest

from bench.targets import Target


@pytest.mark.parametrize(
    ("target", "text", "good", "bad"),
    [
        (Target("ratio", 1.1), ">= 1.1", 1.1, 1.09),
        (Target("share", 0.5), ">= 50 %", 0.5, 0.49),
        (Target("growth", 0.05), "< 5 %", 0.049, 0.05),
    ],
)
def test_a_bound_says_what_is_good_enough(target, text, good, bad):
    assert str(target) == text
    assert target.is_met(good)
    assert not target.is_met(bad)
