"""Every option on every strategy, against dense attention in float64."""

import functools
import zlib

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import Ranges, compare_strategies
from jaxcomm.attention.kernels.scores import random_bits
from jaxcomm.attention.kernels.xla import kernel, tiles
from jaxcomm.attention.strategies.ulysses import Usp

BATCH, TOKENS, HEADS, KEY_HEADS = 2, 37, 8, 2
RATE, DROPOUT_KEY = 0.3, 3


def _documents(seed):
    """Documents of random lengths, of which the last tokens are padding."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, TOKENS, (BATCH, 3)), 1)
    ids = (np.arange(TOKENS) >= cuts[:, :, None]).sum(1)
    ids[:, -2:] = -1
    return ids


def _normal(*shape):
    rng = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _kept():
    """What dropout multiplies each weight with: the same on every mesh."""
    seeds = jax.random.bits(jax.random.key(DROPOUT_KEY), (BATCH, HEADS), jnp.uint32)
    at = jnp.arange(TOKENS)
    bits = random_bits(
        seeds[:, :, None, None], at[None, None, :, None], at[None, None, None]
    )
    return np.where(np.asarray(bits) >= int(RATE * 2**32), 1 / (1 - RATE), 0)


def _ranges(*seeds):
    """Return ranges of keys and of queries; of some tokens nothing is left."""
    pairs = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        first = rng.integers(0, TOKENS, (BATCH, TOKENS))
        end = first + rng.integers(-2, TOKENS, first.shape)
        pairs.append((first // 2, np.where(first % 3, end, 2**31 - 1)))
    return Ranges(*pairs)


OPTIONS = {
    "causal window in documents": dense.Options(
        is_causal=True, window=(4, 9), query_ids=_documents(2)
    ),
    "ranges": dense.Options(
        is_causal=True, query_ids=_documents(3), mask=_ranges(0, 1)
    ),
    "lengths": dense.Options(
        query_lengths=np.array([30, 0]), key_lengths=np.array([21, 37])
    ),
    "causal lengths": dense.Options(
        is_causal=True, query_lengths=np.array([30, 37]), key_lengths=np.array([3, 37])
    ),
    "sinks of empty rows": dense.Options(
        window=(2, 0), query_ids=_documents(3), sinks=_normal(HEADS).at[1].set(-np.inf)
    ),
    "bias": dense.Options(is_causal=True, bias=_normal(BATCH, HEADS, TOKENS, TOKENS)),
    "bias of rows": dense.Options(
        bias=_normal(1, 1, TOKENS, TOKENS), slopes=2.0 ** -jnp.arange(1.0 * HEADS)
    ),
    "bias of keys": dense.Options(window=(9, 9), bias=_normal(1, HEADS, 1, TOKENS)),
    "all": dense.Options(
        window=(11, 2),
        query_ids=_documents(4),
        query_lengths=np.array([33, 37]),
        key_lengths=np.array([20, 36]),
        sinks=_normal(HEADS),
        cap=2.0,
        bias=_normal(BATCH, 1, TOKENS, TOKENS),
        mask=_normal(1, HEADS, TOKENS, TOKENS) > -1,
        slopes=_normal(HEADS),
        kept=_kept(),
    ),
}
# All options at once in each strategy, and apart what it treats in its own way. Each
# strategy meets several schedules and sizes; tests of the ring add more.
CASES = [
    ("ring", "zigzag", 1, "causal lengths"),
    ("ring", "contiguous", 4, "bias"),
    ("ring", "striped", 1, "bias of rows"),
    ("ring", "striped", 4, "all"),
    ("ring", "zigzag", 3, "ranges"),
    ("all_gather", "striped", 4, "lengths"),
    ("all_gather", "zigzag", 3, "all"),
    ("halo", "striped", 3, "sinks of empty rows"),
    ("halo", "zigzag", 4, "bias of keys"),
    ("halo", "contiguous", 4, "all"),
    ("ulysses", "striped", 8, "bias of keys"),
    ("ulysses", "zigzag", 2, "all"),
    (Usp(2), "contiguous", 8, "causal window in documents"),
    (Usp(2), "zigzag", 4, "all"),
    (Usp(2), "striped", 4, "ranges"),
]


@pytest.fixture
def use_tiles(monkeypatch):
    def use(loop):
        monkeypatch.setattr(kernel, "ON_CPU", 4)
        monkeypatch.setitem(vars(kernel.XLA), "over", loop)
        monkeypatch.setattr(tiles, "_FEWEST_QUERIES", 4)

    return use


@pytest.mark.parametrize(("strategy", "schedule", "size", "option"), CASES)
def test_options_equal_dense_attention_with_all_gradients(
    use_tiles, strategy, schedule, size, option
):
    """Output, residual, and the gradients of whatever has one."""
    use_tiles(kernel.over_all if size == 1 else kernel.over_visible)
    *arrays, grads = split.inputs(
        (BATCH, TOKENS, HEADS, 8), (BATCH, TOKENS, KEY_HEADS, 8), value_size=12
    )
    options = OPTIONS[option]
    how = {"size": size, "schedule": schedule, "strategy": strategy}
    if options.kept is not None:
        how["dropout"] = RATE, jax.random.key(DROPOUT_KEY)
    found, expected = split.compare(*arrays, options, grads, **how)
    empty = np.isneginf(expected.lse)
    assert (np.asarray(found.out)[empty] == 0).all()
    assert (np.asarray(found.grad_query)[empty] == 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "size", "heads", "key_heads"),
    [
        ("all_gather", 3, 2, 2),
        ("halo", 4, 4, 2),
        ("ulysses", 2, 4, 4),
        ("ulysses", 3, 6, 2),
        ("ulysses", 4, 4, 1),
        (Usp(2), 4, 2, 1),
    ],
)
def test_fewer_tokens_than_ranks_and_few_heads(
    use_tiles, strategy, size, heads, key_heads
):
    use_tiles(kernel.over_visible)
    shapes = (2, size - 1, heads, 4), (2, size - 1, key_heads, 4)
    *arrays, grads = split.inputs(*shapes, value_size=6)
    options = dense.Options(window=(1, 0), slopes=_normal(heads), sinks=_normal(heads))
    split.compare(*arrays, options, grads, size=size, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "queries", "keys", "key_schedule"),
    [
        ("ring", 5, 31, "striped"),
        ("all_gather", 5, 31, "contiguous"),
        ("ulysses", 24, 13, "striped"),
    ],
)
def test_queries_and_keys_may_differ_in_length_and_schedule(
    strategy, queries, keys, key_schedule
):
    arrays = split.inputs((1, queries, 4, 8), (1, keys, 4, 8))
    how = {"size": 4, "key_schedule": key_schedule, "strategy": strategy}
    options, grads = dense.Options(window=(40, 2)), arrays[3]
    split.compare(*arrays[:3], options, grads, **how)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_rows_of_padding_are_zero_and_minus_infinity(strategy):
    """On the ranks, before anything is cut off."""
    layout = jaxcomm.Layout("contiguous", 4, 13)
    x = layout.reorder(np.asarray(_normal(1, 13, 4, 8)))[0] + 1
    options = {"strategy": strategy, "return_residual": True}

    def attend(x):
        return jaxcomm.ring_attention(x, x, x, "context", layout, **options)

    out, lse = jax.jit(split.sharded(attend))(x)
    assert (out[:, 13:] == 0).all()
    assert jnp.isneginf(lse[:, 13:]).all()
    assert jnp.isfinite(lse[:, :13]).all()


@pytest.mark.parametrize(
    ("schedule", "window", "sends"),
    # 64 tokens on 8 ranks; zigzag has chunks of 4.
    [("contiguous", 8, 1), ("contiguous", 9, 2), ("zigzag", 3, 2)],
)
def test_hops_that_no_rank_sees_are_not_sent(schedule, window, sends):
    options = {"is_causal": True, "local_window_size": (window, 0)}
    layout = jaxcomm.Layout(schedule, 8, 64)
    planned = compare_strategies(
        layout, heads=2, head_size=8, dtype="float32", **options
    ).rows
    assert planned["ring"].sends == sends

    def stats(strategy):
        jaxcomm.finalize()
        attend = functools.partial(
            split.on_ranks, schedule=schedule, strategy=strategy, **options
        )
        x = jnp.ones((1, 64, 2, 8))
        jax.block_until_ready(jax.jit(split.sharded(attend, 8))(x, x, x))
        (found,) = jaxcomm.communicators()
        return found.stats()

    assert stats("ring")["calls"] == {"permute": sends}
    if window == 8:
        assert stats("halo")["bytes"] == 8 * planned["halo"].forward_bytes


@pytest.fixture(scope="module")
def errors_in_bfloat16():
    """Gives the relative errors of results and gradients, by ranks and strategy."""
    # One key head: Ulysses repeats it, and sums its gradients.
    *arrays, grads = split.inputs((1, 256, 8, 16), (1, 256, 1, 16), dtype=jnp.bfloat16)
    options = dense.Options(is_causal=True, window=(200, 0))
    expected = dense.attention(*arrays, options, grads)

    def errors(size, strategy):
        found = split.attend(*arrays, options, grads, size=size, strategy=strategy)
        assert found.out.dtype == jnp.bfloat16
        pairs = zip(found[:5], expected[:5], strict=True)
        squares = [((np.asarray(a, np.float64) - b) ** 2).mean() for a, b in pairs]
        return np.sqrt(squares)

    return errors, errors(1, "ring")


@pytest.mark.parametrize(
    "strategy",
    # Usp is a ring of what Ulysses does.
    ["ring", "ulysses", pytest.param(Usp(4), marks=pytest.mark.thorough)],
    ids=str,
)
def test_the_error_in_bfloat16_is_that_of_one_device(errors_in_bfloat16, strategy):
    errors, alone = errors_in_bfloat16
    ratios = errors(8, strategy) / alone
    # The residual is float32 already; its error is all rounding noise.
    assert np.delete(ratios, 1).max() <= 1.05, ratios
    assert ratios[1] < 3, ratios


def test_the_bits_of_dropout_are_as_good_as_random():
    """Share, and independence of rows, columns and seeds, within five deviations."""
    at = jnp.arange(512)
    bits = random_bits(
        jnp.arange(3, dtype=jnp.uint32)[:, None, None],
        at[None, :, None],
        at[None, None],
    )
    kept = np.asarray(bits) >= int(0.3 * 2**32)
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.size) ** 0.5
    for axis in (1, 2):
        shares = kept.mean(axis)
        assert np.abs(shares - 0.7).max() < 5 * (0.21 / 512) ** 0.5
    centred = (kept - 0.7).reshape(3, -1)
    shifted = (np.roll(kept, 1, 1) - 0.7).reshape(3, -1)
    diagonal = (np.roll(kept, (1, 1), (1, 2)) - 0.7).reshape(3, -1)
    for other in (shifted, diagonal, np.roll(centred, 1, 0)):
        correlation = (centred * other).mean() / 0.21
        assert abs(correlation) < 5 / kept.size**0.5


@pytest.fixture(scope="module")
def with_a_mean():
    """Inputs in [0, 1) of bfloat16, and how wrong ``jax.nn`` is in ``grad_query``."""
    rng = np.random.default_rng(0)
    shape = (1, 256, 4, 32)
    *arrays, grad = (jnp.asarray(rng.random(shape), jnp.bfloat16) for _ in range(4))
    grads = grad, np.zeros(shape[:3], np.float32)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn wants it.
        found = split.results(jax.nn.dot_product_attention, arrays, grad)[1]
    return arrays, grads, _error(found, dense.attention(*arrays, split.PLAIN, grads))


def _error(found, expected):
    found, right = np.asarray(found, np.float64), expected.grad_query
    return np.abs(found - right).max() / np.abs(right).max()


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ring", split.PLAIN),
        ("all_gather", split.PLAIN),
        ("ulysses", split.PLAIN),
        # As much as all keys of a row.
        ("ulysses", dense.Options(sinks=jnp.full(4, 8.5, jnp.float32))),
    ],
)
def test_gradients_of_numbers_with_a_mean_are_as_good_as_those_of_jax_nn(
    with_a_mean, strategy, options
):
    """The rounding of the output would be added up by all keys."""
    arrays, grads, limit = with_a_mean
    how = {"size": 4, "strategy": strategy, "return_residual": False}
    found = split.attend(*arrays, options, grads, **how)
    expected = dense.attention(*arrays, options, grads)
    assert _error(found.grad_query, expected) <= limit < 0.03
