"""What ring_attention takes and refuses, and that the page of it is what code says."""

import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest
from refusals import REFUSALS, attend, x
from supported import page

from jaxcomm.attention import Ulysses
from jaxcomm.attention.ring_attention import ring_attention

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "supported.md"


@pytest.mark.thorough
def test_the_page_is_current():
    assert PAGE.read_text() == page(), (
        "python tests/support/supported.py > docs/supported.md"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_is_refused_raises(refusal):
    error = refusal.raised()
    assert type(error) is refusal.error, error
    # What was asked or found, and what to do.
    assert len(str(error)) > 30


def test_another_strategy_for_a_few_heads_is_possible():
    """What the errors advise."""
    attend(strategy=Ulysses(2))
    attend(strategy="auto")


def test_three_dimensions_are_one_sequence_and_a_list_of_axes_is_a_tuple():
    query, ids = x(8, 2, 4), jnp.zeros(2, jnp.int32)
    out = attend(query, query_segment_ids=ids, query_seq_lengths=jnp.int32(3))
    assert out.shape == query.shape
    assert attend(query, query[:, :1], return_residual=True)[1].shape == (8, 2)
    assert attend(axis_name=["context"]).shape == (1, 8, 2, 4)


def test_a_traced_scale_or_flag_is_refused():
    with pytest.raises(TypeError, match=r"is not a Python number\. Pass a float"):
        jax.jit(lambda scale: attend(scale=scale))(0.5)
    with pytest.raises(TypeError, match="is_causal must be True or False, known"):
        jax.jit(lambda flag: attend(is_causal=flag))(True)


def test_arguments_are_called_and_placed_as_those_of_jax_nn():
    ours = inspect.signature(ring_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert parameter.kind == ours[name].kind, name
    assert list(ours)[:5] == list(theirs)[:5]
