import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.schedules.registry import SCHEDULES, get_schedule
from jaxcomm.attention.schedules.schedule import Schedule

every_schedule = pytest.mark.parametrize("name", sorted(SCHEDULES))


@every_schedule
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 64])
def test_each_position_belongs_to_one_rank(name, size, length):
    schedule = get_schedule(name)
    shard, unshard = schedule.shard(size, length), schedule.unshard(size, length)
    everything = np.arange(size * length)
    np.testing.assert_array_equal(np.sort(shard), everything)
    np.testing.assert_array_equal(shard[unshard], everything)
    assert shard.dtype == unshard.dtype == np.int32
    assert sum(schedule.segments(length)) == length


@every_schedule
@pytest.mark.parametrize("length", [1, 4, 7])
def test_positions_of_a_traced_rank_are_those_of_the_int(name, length):
    schedule = get_schedule(name)
    for rank in range(3):
        traced = jax.jit(lambda r: schedule.positions(r, 3, length))(jnp.int32(rank))
        expected = schedule.positions(rank, 3, length)
        np.testing.assert_array_equal(traced, expected)
        assert traced.dtype == expected.dtype == jnp.int32


@every_schedule
@pytest.mark.parametrize("length", [1, 6, 7])
def test_positions_ascend_without_a_jump_inside_a_segment(name, length):
    schedule = get_schedule(name)
    steps = {"contiguous": 1, "zigzag": 1, "striped": 4}
    for rank in range(4):
        positions, start = schedule.positions(rank, 4, length), 0
        for segment in schedule.segments(length):
            part = positions[start : start + segment]
            assert (np.diff(part) == steps[name]).all()
            start += segment


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


def test_a_schedule_of_the_users_own_is_taken_as_it_is():
    class Reversed(Schedule):
        name = "reversed"

        def positions(self, rank, size, length):
            return (size - 1 - rank) * length + np.arange(length, dtype=np.int32)

    schedule = Reversed()
    assert get_schedule(schedule) is schedule
    assert schedule.shard(2, 2).tolist() == [2, 3, 0, 1]


def test_an_unknown_name_lists_the_known_ones():
    text = r"schedule='zigzags' is not known. Pass one of 'contiguous', 'striped', "
    with pytest.raises(ValueError, match=text + "'zigzag', or an instance of Schedule"):
        get_schedule("zigzags")


def test_something_that_is_no_schedule_is_a_type_error():
    with pytest.raises(TypeError, match=r"schedule=3 is of type int\. Pass one of"):
        get_schedule(3)
