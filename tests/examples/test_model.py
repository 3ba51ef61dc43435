import jax
import jax.numpy as jnp
import numpy as np
import pytest

from language_model import generate, model, reference

CONFIG = model.ModelConfig(layers=2, width=32)


@pytest.fixture(scope="module")
def params():
    return model.init_params(0, CONFIG)


def logits(params, tokens, positions=None):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return model.apply(params, tokens, positions, reference.dense_attention)[0]


def test_draws_the_same_parameters_for_the_same_seed(params):
    again, other = model.init_params(0, CONFIG), model.init_params(1, CONFIG)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    assert not np.array_equal(params["embedding"], other["embedding"])


def test_counts_parameters(params):
    attention = 32 * 32 * 2 + 2 * 32 * 16
    per_layer = attention + 3 * 32 * 128 + 2 * 32
    assert model.count_params(params) == 2 * 256 * 32 + 2 * per_layer + 32


def test_begins_without_preference_among_the_bytes(params):
    tokens = jnp.arange(40, dtype=jnp.int32)[None]
    positions = jnp.arange(40, dtype=jnp.int32)
    losses = model.next_token_losses(
        params, tokens, tokens + 1, positions, reference.dense_attention
    )
    assert losses.shape == (1, 40)
    # 0.3 is three times the spread of the initial logits.
    assert abs(float(losses.mean()) - np.log(256)) < 0.3


def test_sees_no_later_token(params):
    before = logits(params, [1, 2, 3, 4, 5])
    after = logits(params, [1, 2, 3, 9, 9])
    np.testing.assert_array_equal(before[:3], after[:3])
    assert not np.array_equal(before[3], after[3])


def test_every_second_layer_sees_a_window_alone(params):
    seen = []

    def attend(query, key, value, is_windowed):
        seen.append(is_windowed)
        return reference.dense_attention(query, key, value, is_windowed, None, 2)

    three = model.init_params(0, model.ModelConfig(layers=3, width=32))
    tokens, positions = jnp.array([[1, 2, 3, 4, 5]]), jnp.arange(5)
    found = model.apply(three, tokens, positions, attend)
    assert seen == [True, False, True]
    one = model.init_params(0, model.ModelConfig(layers=1, width=32))
    # Of one layer with a window of 2, the last token's logits depend on two tokens.
    before, after = (
        model.apply(one, jnp.array([tokens]), positions, attend)[0, -1]
        for tokens in ([1, 2, 3, 4, 5], [9, 9, 9, 4, 5])
    )
    np.testing.assert_array_equal(before, after)
    assert found.shape == (1, 5, 256)


def test_sees_distances_and_not_places(params):
    tokens = [1, 2, 3, 4, 5]
    shifted = logits(params, tokens, jnp.arange(5, dtype=jnp.int32) + 100)
    # RoPE's angles reach 100 radians, with 24 bits.
    np.testing.assert_allclose(shifted, logits(params, tokens), atol=1e-4)
    stretched = logits(params, tokens, 3 * jnp.arange(5, dtype=jnp.int32))
    assert not np.allclose(stretched, logits(params, tokens), atol=1e-4)


def test_writes_as_many_bytes_as_asked_and_the_same_again(params):
    written = generate.generate(params, b"def ", 12, seed=0, window=4)
    assert len(written) == 12
    assert generate.generate(params, b"def ", 12, seed=0, window=4) == written
    assert generate.generate(params, b"def ", 12, seed=1, window=4) != written


def test_writes_the_likeliest_bytes_when_cold(params):
    tokens = list(b"def ")
    for _ in range(3):
        tokens.append(int(logits(params, tokens)[-1].argmax()))
    written = generate.generate(params, b"def ", 3, seed=0, window=99, temperature=1e-4)
    assert list(written) == tokens[4:]


def test_prints_nothing_that_moves_the_cursor():
    assert (
        generate.printable(b"a\tb\nc\x1b[2J\r\x07\xff")
        == "a\tb\nc·[2J··\N{REPLACEMENT CHARACTER}"
    )
