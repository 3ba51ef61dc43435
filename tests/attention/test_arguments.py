"""What ring_attention takes. What it refuses: ``test_supported.py``."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.ring_attention import ring_attention

LAYOUT = Layout("zigzag", 4, 8)
ONE = jnp.ones((1, 8, 2, 4))


@pytest.fixture
def call(sharded):
    """Trace ring_attention over four ranks; other arrays are on every rank."""

    def trace(query, key=None, **options):
        key = query if key is None else key
        attend = functools.partial(
            ring_attention, layout=LAYOUT, positions=jnp.arange(2),
            **{"axis_name": "context"} | options,
        )  # fmt: skip
        spec = jax.P(*[None] * (query.ndim - 3), "context")
        return jax.eval_shape(sharded(attend, 4, spec, spec), query, key, key)

    return trace


def test_three_dimensions_are_one_sequence(call):
    query = jnp.ones((8, 2, 4))
    ids = jnp.zeros(2, jnp.int32)
    out = call(query, query_segment_ids=ids, query_seq_lengths=jnp.int32(3))
    assert out.shape == query.shape
    assert call(query, query[:, :1], return_residual=True)[1].shape == (8, 2)


def test_a_list_of_axes_is_as_good_as_a_tuple(call):
    assert call(ONE, axis_name=["context"]).shape == ONE.shape


def test_a_traced_scale_or_flag_is_refused(call):
    with pytest.raises(TypeError, match=r"is not a Python number\. Pass a float"):
        jax.jit(lambda scale: call(ONE, scale=scale))(0.5)
    with pytest.raises(TypeError, match="is_causal must be True or False, known"):
        jax.jit(lambda flag: call(ONE, is_causal=flag))(True)


def test_arguments_are_called_and_placed_as_those_of_jax_nn():
    ours = inspect.signature(ring_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert parameter.kind == ours[name].kind, name
    assert list(ours)[:5] == list(theirs)[:5]
