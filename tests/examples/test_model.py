import jax.numpy as jnp
import numpy as np
import pytest

from language_model import generate, model, reference


@pytest.fixture(scope="module")
def params():
    return model.init_params(0, model.ModelConfig(layers=2, width=32))


def logits(params, tokens, attend=reference.dense_attention):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return model.apply(params, tokens, positions, attend)[0]


def test_sees_no_later_token(params):
    before = logits(params, [1, 2, 3, 4, 5])
    after = logits(params, [1, 2, 3, 9, 9])
    np.testing.assert_array_equal(before[:3], after[:3])
    assert not np.array_equal(before[3], after[3])


def test_every_second_layer_sees_a_window_alone():
    seen = []

    def attend(query, key, value, is_windowed):
        seen.append(is_windowed)
        return reference.dense_attention(query, key, value, is_windowed, None, 2)

    three = model.init_params(0, model.ModelConfig(layers=3, width=32))
    logits(three, [1, 2, 3, 4, 5], attend=attend)
    assert seen == [True, False, True]
    one = model.init_params(0, model.ModelConfig(layers=1, width=32))
    # Of one layer with a window of 2, the last token's logits depend on two tokens.
    before, after = (
        logits(one, tokens, attend=attend)[-1]
        for tokens in ([1, 2, 3, 4, 5], [9, 9, 9, 4, 5])
    )
    np.testing.assert_array_equal(before, after)


def test_writes_the_likeliest_bytes_when_cold_and_as_many_as_asked(params):
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
