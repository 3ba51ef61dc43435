"""The tree of a rendezvous: who leads whom, what travels, and who is missing."""

import pytest

from jaxcomm.communicator import tree

SIZES = [1, 2, 31, 32, 33, 64, 1023, 1024, 1025, 40_000]


def blocks(size):
    """Returns the places of each block, by stride and leader."""
    found = {}
    for stride in tree.strides(size):
        for place in range(0, size, stride):
            key = stride, tree.leader(place, stride)
            found.setdefault(key, []).append(place)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_process_tells_one_leader_and_all_tell_the_root(size):
    strides = list(tree.strides(size))
    assert strides[-1] * tree.FAN_IN >= size
    assert len(strides) == 1 or strides[-1] < size
    for (stride, leader), places in blocks(size).items():
        assert places == list(tree.members(leader, stride, size))
        assert places[0] == leader
        assert len(places) <= tree.FAN_IN
    assert [leader for stride, leader in blocks(size) if stride == strides[-1]] == [0]


def test_neighbors_with_equal_values_are_a_run():
    parts = [[[1, "a"]], [[1, "a"]], [[2, "b"]], [[1, "b"], [1, None]]]
    runs = tree.join(parts)
    assert runs == [[2, "a"], [3, "b"], [1, None]]
    assert parts[0] == [[1, "a"]]
    values = tree.expand(runs, (1, 3, 5, 7, 9, 11))
    assert values == {1: "a", 3: "a", 5: "b", 7: "b", 9: "b", 11: None}


def test_values_that_only_python_takes_for_equal_are_no_run():
    values = [True, 1, 1.0, [0], [False], {"a": 1}, {"a": True}]
    runs = tree.join([[[1, value]] for value in values])
    found = tree.expand(runs, range(len(values)))
    assert list(map(repr, found.values())) == list(map(repr, values))


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ({5}, [5]),
        ({0}, [0]),
        ({32, 33, 1999}, [32, 33, 1999]),
        # Its own block could not tell it, but they came.
        ({1024}, [1024]),
    ],
)
def test_those_that_did_not_come_are_found_and_not_their_blocks(absent, named):
    size = 2000

    def came(stride, leader):
        return {
            place
            for place in tree.members(leader, stride, size)
            if not absent.intersection(range(place, min(place + stride, size)))
        }

    assert list(tree.missing(came, size)) == named


def test_a_leader_that_passes_nothing_on_is_missing():
    def came(stride, leader):
        places = set(tree.members(leader, stride, 2000))
        return places - {1: set(), 32: {64}, 1024: {0}}[stride]

    assert list(tree.missing(came, 2000)) == [64]
    assert list(tree.missing(lambda s, p: set(tree.members(p, s, 9)), 9)) == [0]
