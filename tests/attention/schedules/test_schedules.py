import numpy as np
import pytest

from jaxcomm.attention.schedules.registry import SCHEDULES, get_schedule


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_each_position_belongs_to_one_rank(name, size, length):
    schedule = get_schedule(name)
    shard, unshard = schedule.shard(size, length), schedule.unshard(size, length)
    everything = np.arange(size * length)
    np.testing.assert_array_equal(np.sort(shard), everything)
    np.testing.assert_array_equal(shard[unshard], everything)
    assert shard.dtype == unshard.dtype == np.int32
    assert sum(schedule.segments(length)) == length


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [4, 5, 6, 7]),
        ("zigzag", [2, 3, 12, 13]),
        ("striped", [1, 5, 9, 13]),
    ],
)
def test_rank_1_of_4_holds_what_the_docstring_says(name, expected):
    assert get_schedule(name).positions(1, 4, 4).tolist() == expected
