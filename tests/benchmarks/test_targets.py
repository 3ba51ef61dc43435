import pytest

from bench import targets
from bench.targets import MIB, Target


@pytest.mark.parametrize(
    ("op", "payload_bytes", "devices", "bound"),
    [
        ("psum", 256, 2, 1.1),
        ("ppermute", 4096, 4, 0.95),
        ("psum", 16 * MIB, 8, 0.95),
        ("all_gather", 16 * MIB, 2, 8),
        ("all_gather", 16 * MIB, 4, 0.95),
        ("all_gather", 16 * MIB, 8, 3),
        ("all_to_all", 16 * MIB, 2, 3),
        ("all_to_all", 16 * MIB, 8, 2),
        ("psum_bf16", 16 * MIB, 8, 1.5),
        ("psum_bf16", 16 * MIB, 2, 0.95),
    ],
)
def test_collectives_have_the_bounds_of_the_issue(op, payload_bytes, devices, bound):
    target = targets.for_collective(op, payload_bytes, devices)
    assert target == Target("ratio", bound)


def test_what_the_issue_does_not_name_has_no_bound():
    assert targets.for_collective("psum", 32 * MIB, 2) is None
    assert targets.for_collective("psum", 256, 3) is None
    assert targets.for_chain(4) is None
    assert targets.for_scan(4) is None


def test_programs_have_the_bounds_of_the_issue():
    assert [targets.for_chain(count).bound for count in (2, 8)] == [5, 12]
    assert [targets.for_scan(count).bound for count in (2, 8)] == [1.05, 1.05]


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
