import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.sequence import positions, reorder, restore

every_schedule = pytest.mark.parametrize("schedule", sorted(SCHEDULES))


@every_schedule
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 8, 31])
def test_restore_undoes_reorder(schedule, size, length):
    x = jnp.arange(2 * length * 3).reshape(2, length, 3)
    ordered = reorder(x, size, schedule=schedule)
    assert ordered.shape == (2, -(-length // size) * size, 3)
    restored = restore(ordered, size, schedule=schedule, length=length)
    np.testing.assert_array_equal(restored, x)


@every_schedule
def test_each_rank_gets_the_tokens_at_its_positions(schedule):
    x = np.arange(1, 32)
    blocks = reorder(x, 4, schedule=schedule, axis=0).reshape(4, -1)
    padded = np.append(x, 0)
    for rank, block in enumerate(blocks):
        held = positions(rank, 4, 31, schedule=schedule)
        np.testing.assert_array_equal(block, padded[held])


def test_padding_is_zero_and_kept_by_restore_without_a_length():
    ordered = reorder(jnp.ones((7, 2)), 4, schedule="striped", axis=0)
    restored = restore(ordered, 4, schedule="striped", axis=0)
    np.testing.assert_array_equal(restored, [[1, 1]] * 7 + [[0, 0]])


def test_trees_are_reordered_leaf_by_leaf_with_a_negative_axis_too():
    tree = {"tokens": jnp.arange(8), "mask": jnp.arange(16).reshape(2, 8) > 3}
    ordered = reorder(tree, 2, schedule="zigzag", axis=-1)
    assert ordered["tokens"].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ordered["mask"].dtype == bool
    restored = restore(ordered, 2, schedule="zigzag", axis=-1)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, restored, tree))


def test_the_gradient_of_reorder_is_restore():
    x = jnp.arange(7.0)
    _, transpose = jax.vjp(lambda x: reorder(x, 2, schedule="zigzag", axis=0), x)
    grad = reorder(x + 5, 2, schedule="zigzag", axis=0)
    np.testing.assert_array_equal(transpose(grad)[0], x + 5)


def test_positions_of_padding_are_beyond_the_length():
    assert positions(0, 2, 7, schedule="zigzag").tolist() == [0, 1, 6, 7]
    traced = jax.jit(lambda rank: positions(rank, 2, 7, schedule="zigzag"))
    assert traced(1).tolist() == [2, 3, 4, 5]
    assert traced(1).dtype == jnp.int32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: reorder(jnp.ones(4), 0, schedule="zigzag"),
            "reorder: size=0 ranks. A ring has at least one rank",
        ),
        (
            lambda: reorder(jnp.ones(4), 2, schedule="zigzag"),
            r"reorder: axis=1 was asked for, but x has shape \(4,\). Pass the axis",
        ),
        (
            lambda: restore(jnp.ones(7), 2, schedule="zigzag", axis=0),
            "restore: dimension 0 of x has 7 tokens, not divisible by the 2 ranks",
        ),
        (
            lambda: restore(jnp.ones(8), 2, schedule="zigzag", axis=0, length=9),
            "restore: length=9 was asked for, but dimension 0 of x has 8 tokens",
        ),
        (
            lambda: positions(2, 2, 8, schedule="zigzag"),
            "positions: rank=2 is outside the 2 ranks. Pass 0 to 1",
        ),
        (
            lambda: positions(np.int64(9), 2, 7, schedule="zigzag"),
            "positions: rank=9 is outside the 2 ranks. Pass 0 to 1",
        ),
        (
            lambda: positions(0, 2, -1, schedule="zigzag"),
            "positions: length=-1 tokens. Pass zero or more",
        ),
        (
            lambda: reorder(jnp.ones(4), 2, schedule="spiral", axis=0),
            "schedule='spiral' is not known",
        ),
    ],
)
def test_bad_values_say_what_was_asked_and_found(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: reorder(x, 2.0, schedule="zigzag"), "reorder: size"),
        (lambda x: reorder(x, 2, schedule="zigzag", axis=0.0), "reorder: axis"),
        (lambda x: restore(x, 2, schedule="zigzag", length=3.0), "restore: length"),
        (lambda x: positions(0, 2, 4.5, schedule="zigzag"), "positions: length"),
        (lambda x: positions(0.5, 2, 4, schedule="zigzag"), "positions: rank"),
        (lambda x: positions("0", 2, 4, schedule="striped"), "positions: rank"),
        (lambda x: positions(x[0, 0], 2, 4, schedule="striped"), "positions: rank"),
    ],
)
def test_what_counts_is_an_integer(call, what):
    with pytest.raises(
        TypeError,
        match=f"^{what} must be (an integer known when|one integer, got float32)",
    ):
        call(jnp.ones((1, 4)))
