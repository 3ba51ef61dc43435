"""Every mistake that a call can see is an error that says what to do."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.ring_attention import ring_attention

SPLIT = jax.P(None, "context")
LAYOUT = Layout("zigzag", 4, 8)
x = functools.partial(jnp.ones, dtype=jnp.float32)
ONE = (x((1, 8, 2, 4)),)


@pytest.fixture
def call(mesh_of):
    """Trace ring_attention over four ranks; other arrays are on every rank."""

    def trace(query, key=None, value=None, *, layout=LAYOUT, **options):
        key = query if key is None else key
        value = key if value is None else value

        def local(query, key, value):
            positions = jnp.arange(2) if layout is LAYOUT else None
            return ring_attention(
                query, key, value, axis_name="context", layout=layout,
                positions=positions, **options,
            )  # fmt: skip

        split = SPLIT if query.ndim == 4 else jax.P("context")
        whole = jax.shard_map(local, mesh=mesh_of(4), in_specs=split, out_specs=split)
        return jax.eval_shape(whole, query, key, value)

    return trace


def test_three_dimensions_are_one_sequence(call):
    query = x((8, 2, 4))
    ids = jnp.zeros(2, jnp.int32)
    out = call(query, query_segment_ids=ids, query_seq_lengths=jnp.int32(3))
    assert out.shape == query.shape
    assert call(query, x((8, 1, 4)), return_residual=True)[1].shape == (8, 2)


def test_a_list_of_axes_is_as_good_as_a_tuple(mesh_of):
    attend = functools.partial(
        ring_attention, axis_name=["context"], layout=LAYOUT, positions=jnp.arange(2)
    )
    whole = jax.shard_map(attend, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
    assert jax.eval_shape(whole, *ONE * 3).shape == ONE[0].shape


def test_a_traced_scale_or_flag_is_refused(call):
    with pytest.raises(TypeError, match=r"is not a Python number\. Pass a float"):
        jax.jit(lambda scale: call(*ONE, scale=scale))(0.5)
    with pytest.raises(TypeError, match="is_causal must be True or False, known"):
        jax.jit(lambda flag: call(*ONE, is_causal=flag))(True)


def test_outside_of_shard_map_the_error_says_what_to_do():
    with pytest.raises(
        NameError, match=r"context.*Call jaxcomm\.ring_attention inside jax\.shard_map"
    ):
        ring_attention(*ONE * 3, axis_name="context", layout=LAYOUT)


def test_a_forgotten_layout_is_pythons_own_error():
    with pytest.raises(TypeError, match="keyword-only argument: 'layout'"):
        ring_attention(*ONE * 3, axis_name="context")


def test_arguments_are_called_and_placed_as_those_of_jax_nn():
    ours = inspect.signature(ring_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert parameter.kind == ours[name].kind, name
    assert list(ours)[:5] == list(theirs)[:5]
