"""Who holds which tokens, and moving them there: beside NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.permutation import permute
from jaxcomm.attention.schedules import SCHEDULES, Zigzag

every_schedule = pytest.mark.parametrize("schedule", sorted(SCHEDULES))


@every_schedule
@pytest.mark.parametrize(
    ("rows", "size", "length", "arrays"),
    [
        (2, 1, 8, jnp),
        (2, 2, 0, np),
        (2, 3, 31, np),
        (2, 3, 31, jnp),
        (2, 8, 1, jnp),
        (2, 8, 31, np),
        (0, 2, 5, np),
        (0, 2, 5, jnp),
    ],
)
def test_restore_undoes_reorder(schedule, rows, size, length, arrays):
    x = arrays.arange(rows * length * 3).reshape(rows, length, 3)
    layout = Layout(schedule, size, length)
    ordered, tokens = layout.reorder(x)
    assert ordered.shape == (rows, layout.local_length * size, 3)
    assert tokens.positions.shape == ordered.shape[:2]
    assert type(ordered) is type(tokens.positions) is type(x)
    held = np.concatenate([layout.positions_of(rank) for rank in range(size)])
    padding = ((0, 0), (0, ordered.shape[1] - length), (0, 0))
    np.testing.assert_array_equal(ordered, np.pad(x, padding)[:, held])
    of_a_row = [Tokens(layout, tokens.positions[0])] if rows else []
    for held in (tokens, *of_a_row):
        np.testing.assert_array_equal(held.restore(ordered), x)
    assert layout.local_length == -(-length // size)
    segments = layout.schedule.segments(layout.local_length)
    assert sum(segments) == layout.local_length


def test_the_gradient_of_reorder_is_restore():
    layout = Layout("zigzag", 2, 7)
    x = jnp.arange(7.0)
    dealt, transpose = jax.vjp(lambda x: layout.reorder(x, axis=0)[0], x)
    moved, tokens = layout.reorder(x + 5, axis=-1)
    np.testing.assert_array_equal(transpose(moved)[0], x + 5)
    _, transpose = jax.vjp(lambda x: tokens.restore(x, axis=0), dealt)
    np.testing.assert_array_equal(transpose(x + 5)[0], moved)


def test_layouts_are_values():
    one, other = Layout("zigzag", 2, 7), Layout(Zigzag(), 2, 7)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout("striped", 2, 7)
    assert one != Layout("zigzag", 4, 7)
    assert one != Layout("zigzag", 2, 8)
    assert jax.tree.leaves(one) == []
    assert jax.jit(lambda layout: layout)(one) == one


def test_an_order_of_any_integers_is_that_of_int32():
    held = [[3, 0, 5], [1, 2, 4]]
    expected = Layout("zigzag", 2, 5, np.array(held, np.int32))
    x = np.arange(1, 6)
    for order in (held, np.array(held, np.uint64), jnp.array(held)):
        layout = Layout("zigzag", 2, 5, order)
        assert layout.order.dtype == np.int32
        jax.tree.map(
            np.testing.assert_array_equal, layout.reorder(x, 0), expected.reorder(x, 0)
        )
    assert dataclasses.replace(expected, length=5) == expected


def test_a_float_without_nan_has_a_number_for_tokens_out_of_place():
    x = jnp.ones((1, 4), jnp.float4_e2m1fn)
    tokens = Tokens(Layout("zigzag", 2, 4), jnp.zeros((1, 4), jnp.int32))
    found = jax.jit(Tokens.restore)(tokens, x)
    assert found.astype(jnp.float32).tolist() == [[-6.0] * 4]


@pytest.mark.parametrize("length", [16, 13])
def test_arrays_and_tokens_stay_sharded_on_a_mesh_of_explicit_axes(length):
    layout = Layout("zigzag", 4, length)
    x = np.arange(4.0 * length).reshape(2, length, 2)
    ids, lengths = np.arange(length) // 5, np.array([length, 9])
    of_ids = {"segment_ids": ids, "lengths": lengths}
    held, tokens = layout.reorder(x, **of_ids)
    expected = held, dataclasses.replace(tokens, table=None)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "context"))):
        # 13 tokens cannot be split in their natural order.
        spec = ("data", "context" if length == 16 else None)
        given = jax.device_put(x, jax.P(*spec))
        split = jax.device_put({"lengths": lengths}, jax.P("data"))
        for of in (of_ids, of_ids | split):
            found = layout.reorder(given, **of)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            for leaf in jax.tree.leaves(found):
                assert leaf.sharding.spec[:2] == spec
        labels, _ = layout.reorder(given, shift=1, **of_ids)
        assert labels.sharding.spec[:2] == spec
        by_numpy, _ = layout.reorder(x, shift=1, **of_ids)
        np.testing.assert_array_equal(labels, by_numpy)
        held, tokens = jax.device_put(expected, jax.P("data", "context"))
        for restore in (Tokens.restore, jax.jit(Tokens.restore)):
            back = restore(tokens, held)
            np.testing.assert_array_equal(back, x)
            assert back.sharding.spec[:2] == spec
        loss = jax.jit(jax.grad(lambda x: (tokens.restore(x) ** 2).sum()))
        np.testing.assert_array_equal(loss(held), 2 * np.asarray(held))


RANDOM = np.random.default_rng(0)
ORDERS = {
    "none": np.zeros(0, np.int32),
    "one token": np.zeros(1, np.int32),
    "natural": np.arange(12),
    "backwards": np.arange(12)[::-1],
    "any": RANDOM.permutation(13),
    "of more runs than are copied": RANDOM.permutation(1000),
    "zigzag": Layout("zigzag", 4, 40).all_positions(),
    "striped": Layout("striped", 4, 40).all_positions(),
    "striped, collected": np.argsort(Layout("striped", 4, 40).all_positions()),
    "striped of one token each": Layout("striped", 4, 4).all_positions(),
}


@pytest.mark.parametrize("name", ORDERS)
def test_permute_is_what_numpy_takes_and_its_gradient_puts_back(name):
    axis, places = list(ORDERS).index(name) % 3, ORDERS[name]
    shape = [2, 3, 2]
    shape[axis] = len(places)
    x, weights = RANDOM.standard_normal((2, *shape)).astype(np.float32)
    out, transpose = jax.vjp(lambda x: permute(x, places, axis), x)
    np.testing.assert_array_equal(out, np.take(x, places, axis))
    (grad,) = transpose(jnp.asarray(weights))
    expected = np.take(weights, np.argsort(places), axis)
    np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("name", ["natural", "zigzag", "striped"])
def test_orders_of_layouts_neither_gather_nor_scatter(name):
    def of_squares(x):
        return (permute(x, ORDERS[name], 1) ** 2).sum()

    x = jnp.ones((2, len(ORDERS[name])))
    text = str(jax.make_jaxpr(jax.grad(of_squares))(x))
    assert not re.search("gather|scatter", text), text
