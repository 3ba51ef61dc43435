import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.attention import arguments
from jaxcomm.attention.strategies.ring import ring_attention

SPLIT = jax.P(None, "context")


@pytest.fixture
def call(mesh_of):
    """Trace ring_attention over four ranks."""

    def trace(query, key=None, value=None, **options):
        key = query if key is None else key
        value = key if value is None else value
        attend = functools.partial(ring_attention, axis_name="context", **options)
        whole = jax.shard_map(attend, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
        return jax.eval_shape(whole, query, key, value)

    return trace


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bias", "gather K and V and call jax.nn.dot_product_attention"),
        ("mask", "Use is_causal, length and key_length, or gather K and V"),
        ("query_seq_lengths", "Pad the sequences of the batch to one length"),
        ("key_value_seq_lengths", "one length and pass key_length"),
        ("local_window_size", "Leave it out, or gather K and V"),
        ("dropout_rate", "Leave it out, or apply dropout to the output"),
        ("sinks", "merge the sinks by hand from return_residual=True"),
        ("logits_soft_cap", "Leave it out, or gather K and V"),
    ],
)
def test_what_is_not_supported_is_refused_with_advice(call, name, advice):
    text = f"ring_attention: {name} was given (int), and the ring does not support it"
    with pytest.raises(ValueError, match=re.escape(text) + ".*" + re.escape(advice)):
        call(jnp.ones((1, 8, 2, 4)), **{name: 3})


def test_a_list_of_axes_is_as_good_as_a_tuple(mesh_of):
    attend = functools.partial(ring_attention, axis_name=["context"], is_causal=True)
    whole = jax.shard_map(attend, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
    query = jnp.ones((1, 8, 2, 4))
    assert jax.eval_shape(whole, query, query, query).shape == query.shape


x = functools.partial(jnp.ones, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "text"),
    [
        (
            (x((8, 8, 4)),),
            {},
            "query has shape (8, 2, 4). Pass 4 dimensions: batch, tokens, heads",
        ),
        (
            (x((1, 8, 2, 0)),),
            {},
            "the head size is 0 (query (1, 2, 2, 0) float32, ",
        ),
        (
            (x((1, 8, 2, 4)), x((1, 8, 2, 4)), x((1, 16, 2, 4))),
            {},
            "key and value differ in shape",
        ),
        (
            (x((1, 8, 2, 4)), x((2, 8, 2, 4))),
            {},
            "batch or head size differ (query (1, 2, 2, 4) float32, key (2, 2, 2, 4)",
        ),
        (
            (x((1, 8, 4, 4)), x((1, 8, 3, 4))),
            {},
            "4 query heads are not a multiple of 3 key heads",
        ),
        (
            (x((1, 8, 2, 4)), x((1, 16, 2, 4))),
            {"is_causal": True},
            "is_causal=True with 2 queries and 4 keys per rank",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"schedule": "spiral"},
            "schedule='spiral' is not known",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"length": 9},
            "length=9 tokens, but 4 ranks with 2 tokens each hold 8. Pass the length",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"key_length": -1},
            "key_length=-1 tokens, but 4 ranks with 2 tokens each hold 8",
        ),
        (
            (x((1, 8, 2, 4)), x((1, 16, 2, 4))),
            {"length": 7},
            "length=7 was given, but ranks hold 2 queries and 4 keys. Pass key_length",
        ),
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
            (x((1, 8, 2, 4)), jnp.ones((1, 8, 2, 4), jnp.bfloat16)),
            {},
            "key (1, 2, 2, 4) bfloat16, value (1, 2, 2, 4) bfloat16). Cast them",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"length": 7.0},
            "length=7.0 is not an int",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"scale": "large"},
            "scale='large' is not a Python number. Pass a float, or scale=1.0",
        ),
        (
            (x((1, 8, 2, 4)),),
            {"schedule": 2},
            "schedule=2 is of type int",
        ),
        *(
            (
                (x((1, 8, 2, 4)),),
                {name: found},
                f"{name} must be True or False, known when the program is traced, "
                f"got {found!r}",
            )
            for name in ("is_causal", "return_residual")
            for found in ("yes", 2, None)
        ),
        *(
            (
                (x((1, 8, 2, 4)),),
                {"scale": found},
                f"scale={found!r} is not a Python number. Pass a float",
            )
            for found in ("0.5", True)
        ),
    ],
)
def test_types_that_do_not_fit_say_what_was_found(call, arrays, options, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        call(*arrays, **options)


def test_a_traced_scale_or_length_is_refused(call):
    array = x((1, 8, 2, 4))
    with pytest.raises(TypeError, match=r"is not a Python number\. Pass a float"):
        jax.jit(lambda scale: call(array, scale=scale))(0.5)
    with pytest.raises(TypeError, match=r"is traced\. Pass the number of tokens"):
        jax.jit(lambda length: call(array, length=length))(5)


def test_outside_of_shard_map_the_axis_is_not_bound():
    array = x((1, 8, 2, 4))
    with pytest.raises(NameError, match="context"):
        ring_attention(array, array, array, axis_name="context")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("block_size", "'block_size'. Leave it out; it takes query, key, value, axis_"),
        ("casual", "'casual'. Did you mean 'is_causal'?"),
        ("key_lenght", "'key_lenght'. Did you mean 'key_length'?"),
        # Called so by other packages, where the nearest name here is another.
        ("softmax_scale", "'softmax_scale'. Did you mean 'scale'?"),
        *(
            (name, f"{name!r}, and the ring does not support that yet. {advice}")
            for name, advice in {
                "segment_ids": "Leave it out, or gather K and V and call jax.nn.dot",
                "q_segment_ids": "Leave it out, or gather K and V and call jax.nn.dot",
                "window": "Leave it out, or gather K and V and call jax.nn.dot_product",
                "sliding_window": "Leave it out, or gather K and V and call jax.nn.dot",
                "attn_mask": "Use is_causal, length and key_length, or gather",
                "dropout": "Leave it out, or apply dropout to the output",
                "soft_cap": "Leave it out, or gather K and V and compute",
            }.items()
        ),
    ],
)
@pytest.mark.parametrize("found", [3, None])
def test_an_unknown_argument_is_a_type_error_with_advice(call, name, text, found):
    text = f"ring_attention: it has no argument {text}"
    with pytest.raises(TypeError, match="^" + re.escape(text)):
        call(x((1, 8, 2, 4)), **{name: found})


def test_the_signature_names_every_argument():
    kinds = {p.kind for p in inspect.signature(ring_attention).parameters.values()}
    assert kinds == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }


def test_what_packages_call_an_argument_is_not_one_of_ours():
    ours = inspect.signature(ring_attention).parameters.keys()
    assert not arguments._CALLED_HERE.keys() & ours
    assert set(arguments._CALLED_HERE.values()) <= ours | arguments._ADVICE.keys()


def test_a_traced_flag_is_refused(call):
    array = x((1, 8, 2, 4))
    with pytest.raises(TypeError, match="is_causal must be True or False, known"):
        jax.jit(lambda flag: call(array, is_causal=flag))(True)


def test_lengths_are_known_to_a_cross_attention_given_both(call):
    out = call(x((1, 8, 2, 4)), x((1, 16, 2, 4)), length=7, key_length=15)
    assert out.shape == (1, 8, 2, 4)
