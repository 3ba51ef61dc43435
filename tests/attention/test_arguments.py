"""Every mistake that a call can see is an error that says what to do."""

import functools
import inspect
import re

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


@pytest.mark.parametrize(
    ("arrays", "options", "text"),
    [
        (
            (x((8, 2, 4)), x((4, 8, 2, 4))),
            {},
            "query (2, 2, 4), key (1, 8, 2, 4), value (1, 8, 2, 4). Pass 4 dimensions "
            "each",
        ),
        ((x((1, 8, 2, 0)),), {}, "the head size is 0 (query (1, 2, 2, 0) float32, "),
        (
            (*ONE, *ONE, x((1, 16, 2, 4))),
            {},
            "key and value differ in shape",
        ),
        (
            (*ONE, x((2, 8, 2, 4))),
            {},
            "batch or head size differ (query (1, 2, 2, 4) float32, key (2, 2, 2, 4)",
        ),
        (
            (x((1, 8, 4, 4)), x((1, 8, 3, 4))),
            {},
            "4 query heads are not a multiple of 3 key heads",
        ),
        # What does not fit the layout.
        (
            ONE,
            {"layout": Layout("zigzag", 4, 13)},
            "query has 2 tokens on this rank, and layout gives each of its 4 ranks 4 of"
            " 13. Reorder query with the layout that is passed as layout",
        ),
        (
            ONE,
            {"layout": Layout("zigzag", 8, 16)},
            "ring_attention: the layout is of 8 ranks, and axis 'context' has 4. "
            "Reorder the sequence with a layout of size=4",
        ),
        (
            (*ONE, x((1, 16, 2, 4))),
            {},
            "key has 4 tokens on this rank, and layout gives each of its 4 ranks 2",
        ),
        (
            (*ONE, x((1, 16, 2, 4))),
            {"key_layout": LAYOUT},
            "key has 4 tokens on this rank, and key_layout gives each of its 4 ranks 2",
        ),
        # Heads before tokens.
        ((x((1, 4, 8, 4)),), {}, "check that dimension 1 counts tokens"),
        # Options.
        (ONE, {"local_window_size": (-1, 2)}, "local_window_size=(-1, 2). Pass how m"),
        (ONE, {"logits_soft_cap": 0}, "logits_soft_cap=0.0. Pass a positive number"),
        (ONE, {"scale": float("nan")}, "scale=nan is not finite"),
        (ONE, {"dropout_rate": 1.0}, "dropout_rate=1.0. Pass 0 or more, below 1"),
        (ONE, {"dropout_rate": 0.5}, "dropout_rate=0.5 without a dropout_key. Pass"),
        (ONE, {"sinks": x(3)}, "sinks has shape (3,). Pass one number for each of th"),
        (ONE, {"alibi_slopes": x((2, 1))}, "alibi_slopes has shape (2, 1). Pass one"),
        (
            ONE,
            {"bias": x((1, 2, 8, 8))},
            "bias has shape (1, 2, 8, 8) on this rank, and does not broadcast to "
            "(1, 2, 2, 8): batch, heads, this rank's queries, and all keys",
        ),
        (
            ONE,
            {"query_segment_ids": jnp.zeros((1, 8), int)},
            "query_segment_ids has shape (1, 8) on this rank, and (1, 2) is expected",
        ),
        (
            ONE,
            {"key_value_segment_ids": jnp.zeros((1, 2), int)},
            "segment ids were given for the keys alone. Pass both",
        ),
        (
            (*ONE, x((1, 16, 2, 4))),
            {
                "query_segment_ids": jnp.zeros((1, 2), int),
                "key_layout": Layout("zigzag", 4, 16),
            },
            "segment ids were given for the queries alone. Pass both",
        ),
        (
            ONE,
            {"key_value_seq_lengths": jnp.ones(2, int)},
            "key_value_seq_lengths has shape (2,) on this rank, and (1,) is expected",
        ),
        # Strategies and implementations.
        (ONE, {"strategy": "star"}, "strategy='star' is not known. Pass one of 'ring'"),
        (
            ONE,
            {"strategy": "halo"},
            "strategy='halo' was asked for, but there is no w",
        ),
        (
            ONE,
            {"strategy": "ulysses"},
            "strategy='ulysses' was asked for, but 4 ranks share 2 query heads and 2 "
            "key heads, and only multiples of 4 query heads can be shared so",
        ),
        (
            (x((1, 8, 2, 4)), x((1, 8, 1, 4))),
            {"strategy": "usp"},
            "strategy='usp' was asked for, but a group of 1 of 4 ranks leaves nothing",
        ),
        (ONE, {"implementation": "flash"}, "implementation='flash' is not known"),
    ],
)
def test_values_that_do_not_fit_say_what_was_found(call, arrays, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        call(*arrays, **options)


@pytest.mark.parametrize(
    ("arrays", "options", "text"),
    [
        (
            (jnp.ones((1, 8, 2, 4), jnp.int32),),
            {},
            "query has dtype int32. Pass a floating dtype",
        ),
        (
            (*ONE, jnp.ones((1, 8, 2, 4), jnp.bfloat16)),
            {},
            "key (1, 2, 2, 4) bfloat16, value (1, 2, 2, 4) bfloat16). Cast them",
        ),
        (
            ONE,
            {"layout": "zigzag"},
            "layout='zigzag' is no layout. Pass jaxcomm.Lay",
        ),
        (ONE, {"strategy": 2}, "strategy=2 is of type int"),
        (ONE, {"sinks": jnp.ones(2, int)}, "sinks has dtype int32. Pass a floating"),
        (ONE, {"bias": jnp.ones((1, 1, 2, 8), int)}, "bias has dtype int32. Pass a fl"),
        (ONE, {"mask": x((1, 1, 2, 8))}, "mask has dtype float32. Pass bool"),
        (ONE, {"query_segment_ids": x((1, 2))}, "query_segment_ids has dtype float32."),
        *(
            (ONE, {"local_window_size": found}, "Pass an int, or a pair (left, right)")
            for found in ("4", 2.5, (1, 2, 3), True, (1, None))
        ),
        *(
            (
                ONE,
                {name: found},
                f"{name} must be True or False, known when the program is traced, "
                f"got {found!r}",
            )
            for name in ("is_causal", "return_residual")
            for found in ("yes", 2, None)
        ),
        *(
            (ONE, {"scale": found}, f"scale={found!r} is not a Python number. Pass a f")
            for found in ("large", "0.5", True)
        ),
    ],
)
def test_types_that_do_not_fit_say_what_was_found(call, arrays, options, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        call(*arrays, **options)


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
