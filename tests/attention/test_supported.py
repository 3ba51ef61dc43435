"""What ring_attention takes and refuses, and that the page of it is what code says."""

import functools
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from refusals import REFUSALS, WITH_IDS, attend, x
from supported import page

import jaxcomm

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
    for name in re.findall(r"\bjaxcomm(?:\.\w+)+", str(error)):
        # It is there: a text may outlive a name.
        functools.reduce(getattr, name.split(".")[1:], jaxcomm)


def test_three_dimensions_are_one_sequence_and_a_list_of_axes_is_a_tuple():
    query = x(8, 2, 4)
    out = attend(query, tokens=WITH_IDS)
    assert out.shape == query.shape
    assert attend(query, query[:, :1], return_residual=True)[1].shape == (8, 2)
    assert attend(axis_name=["context"]).shape == (1, 8, 2, 4)


def test_a_traced_scale_or_flag_or_length_is_refused():
    with pytest.raises(TypeError, match=r"is not a Python number\. Pass a float"):
        jax.jit(lambda scale: attend(scale=scale))(0.5)
    with pytest.raises(TypeError, match="is_causal must be True or False, known"):
        jax.jit(lambda flag: attend(is_causal=flag))(True)
    with pytest.raises(TypeError, match="known when the program is traced"):
        jax.jit(jaxcomm.attention.segment_ids_of)(np.ones(2, int))


def test_arguments_are_called_and_placed_as_those_of_jax_nn():
    theirs, whole, ring = (
        inspect.signature(function).parameters
        for function in (
            jax.nn.dot_product_attention,
            jaxcomm.dot_product_attention,
            jaxcomm.ring_attention,
        )
    )
    for name, parameter in theirs.items():
        assert parameter.kind == whole[name].kind, name
    assert list(whole)[:5] == list(theirs)[:5]
    # Lengths are in the tokens.
    of_tokens = {"query_seq_lengths", "key_value_seq_lengths"}
    assert set(theirs) - of_tokens <= set(ring)
    assert list(ring)[:5] == ["query", "key", "value", "axis_name", "tokens"]
