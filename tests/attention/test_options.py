"""Every option on every strategy, against dense attention in float64."""

import zlib

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import plan
from jaxcomm.attention.kernels import tile_loops, tiling
from jaxcomm.attention.kernels.scores import random_bits
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.strategies.usp import Usp

BATCH, TOKENS, HEADS, KEY_HEADS = 2, 37, 8, 2
RATE, DROPOUT_KEY = 0.3, 3


def _documents(seed):
    """Documents of random lengths, of which the last tokens are padding."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, TOKENS, (BATCH, 3)), 1)
    ids = (np.arange(TOKENS) >= cuts[:, :, None]).sum(1).astype(np.int32)
    ids[:, -2:] = -1
    return ids


def _normal(*shape):
    rng = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _kept():
    """What dropout multiplies each weight with: the same on every mesh."""
    seeds = jax.random.bits(jax.random.key(DROPOUT_KEY), (BATCH, HEADS), jnp.uint32)
    at = jnp.arange(TOKENS)
    bits = random_bits(seeds[:, :, None, None], at[:, None], at)
    return np.where(np.asarray(bits) >= int(RATE * 2**32), 1 / (1 - RATE), 0)


OPTIONS = {
    "nothing": dense.Options(),
    "causal": dense.Options(is_causal=True),
    "window": dense.Options(window=(6, 3)),
    "documents": dense.Options(query_ids=_documents(1)),
    "causal window in documents": dense.Options(
        is_causal=True, window=(4, 9), query_ids=_documents(2)
    ),
    "lengths": dense.Options(
        query_lengths=np.array([30, 0]), key_lengths=np.array([21, 37])
    ),
    "causal lengths": dense.Options(
        is_causal=True, query_lengths=np.array([30, 37]), key_lengths=np.array([3, 37])
    ),
    "sinks of empty rows": dense.Options(
        window=(2, 0), query_ids=_documents(3), sinks=_normal(HEADS)
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
        slopes=_normal(HEADS),
        kept=_kept(),
    ),
}
# All options at once in each strategy, and apart what it treats in its own way. Each
# strategy meets several schedules and sizes; tests of the ring add more.
CASES = [
    ("ring", "contiguous", 3, "nothing"),
    ("ring", "zigzag", 8, "window"),
    ("ring", "contiguous", 4, "causal window in documents"),
    ("ring", "zigzag", 1, "causal lengths"),
    ("ring", "contiguous", 8, "bias"),
    ("ring", "striped", 1, "bias of rows"),
    ("ring", "striped", 4, "all"),
    ("all_gather", "contiguous", 2, "documents"),
    ("all_gather", "striped", 4, "lengths"),
    ("all_gather", "zigzag", 3, "all"),
    ("halo", "striped", 3, "sinks of empty rows"),
    ("halo", "zigzag", 4, "bias of keys"),
    ("halo", "contiguous", 8, "all"),
    ("ulysses", "contiguous", 4, "causal"),
    ("ulysses", "striped", 8, "bias of keys"),
    ("ulysses", "zigzag", 2, "all"),
    ("usp", "striped", 4, "bias"),
    ("usp", "contiguous", 8, "causal window in documents"),
    ("usp", "zigzag", 8, "all"),
]


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles in few tokens."""
    loop = tile_loops.TileLoop(4, tile_loops.over_visible)
    monkeypatch.setattr(tile_loops, "ON_CPU", loop)
    monkeypatch.setattr(tiling, "_FEWEST_QUERIES", 4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("strategy", "schedule", "size", "option"), CASES)
def test_options_equal_dense_attention_with_all_gradients(
    assert_close, strategy, schedule, size, option
):
    """Output, residual, and the gradients of whatever has one."""
    *arrays, grads = split.random_inputs(
        (BATCH, TOKENS, HEADS, 8), (BATCH, TOKENS, KEY_HEADS, 8), value_size=12
    )
    options = OPTIONS[option]
    dropout = {}
    if options.kept is not None:
        key = jax.random.key(DROPOUT_KEY)
        dropout = {"dropout_rate": RATE, "dropout_key": key}
    strategy = Usp(2) if strategy == "usp" else strategy
    found = split.attend(
        *arrays, options, grads, size=size, schedule=schedule, strategy=strategy,
        **dropout,
    )  # fmt: skip
    expected = dense.attention(*arrays, options, grads)
    assert_close(found, expected, 1e-5)
    empty = np.isneginf(expected.lse)
    assert (np.asarray(found.out)[empty] == 0).all()
    assert (np.asarray(found.grad_query)[empty] == 0).all()


@pytest.mark.parametrize(
    ("strategy", "lengths", "key_schedule"),
    [
        ("ring", (5, 31), "striped"),
        ("all_gather", (5, 31), "contiguous"),
        ("ulysses", (24, 13), "striped"),
    ],
)
def test_queries_and_keys_may_differ_in_length_and_schedule(
    assert_close, strategy, lengths, key_schedule
):
    queries, keys = lengths
    *arrays, grads = split.random_inputs((1, queries, 4, 8), (1, keys, 4, 8))
    options = dense.Options(window=(40, 2))
    found = split.attend(
        *arrays, options, grads, size=4, key_schedule=key_schedule, strategy=strategy
    )
    assert_close(found, dense.attention(*arrays, options, grads), 1e-5)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_rows_of_padding_are_zero_and_minus_infinity(mesh_of, strategy):
    """On the ranks, before anything is cut off."""
    layout = jaxcomm.Layout("contiguous", 4, 13)
    x = layout.reorder(np.asarray(_normal(1, 13, 4, 8)))[0] + 1

    def local(x):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, strategy=strategy,
            return_residual=True,
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=mesh_of(4), in_specs=split.SPLIT, out_specs=split.SPLIT
    )
    out, lse = jax.jit(whole)(x)
    assert (out[:, 13:] == 0).all()
    assert jnp.isneginf(lse[:, 13:]).all()
    assert jnp.isfinite(lse[:, :13]).all()


@pytest.mark.parametrize(
    ("schedule", "options", "sends"),
    [
        # 64 tokens on 8 ranks; zigzag has chunks of 4.
        ("contiguous", {"is_causal": True, "local_window_size": (8, 0)}, 1),
        ("contiguous", {"is_causal": True, "local_window_size": (9, 0)}, 2),
        ("zigzag", {"is_causal": True, "local_window_size": (3, 0)}, 2),
    ],
)
def test_hops_that_no_rank_sees_are_not_sent(mesh_of, schedule, options, sends):
    layout = jaxcomm.Layout(schedule, 8, 64)

    def attend(strategy):
        def local(x):
            return jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=layout, strategy=strategy,
                positions=TRUSTED, **options,
            )  # fmt: skip

        return jax.shard_map(
            local, mesh=mesh_of(8), in_specs=split.SPLIT, out_specs=split.SPLIT
        )

    problem = plan(layout, heads=2, head_size=8, dtype="float32", **options)
    assert problem.rows["ring"].sends == sends
    x = jnp.ones((1, 64, 2, 8))
    jax.block_until_ready(jax.jit(attend("ring"))(x))
    (found,) = jaxcomm.communicators()
    assert found.stats()["calls"] == {"permute": sends}
    if schedule == "contiguous":
        jaxcomm.finalize()
        jax.block_until_ready(jax.jit(attend("halo"))(x))
        (found,) = jaxcomm.communicators()
        assert found.stats()["bytes"] == 8 * problem.rows["halo"].forward_bytes


@pytest.fixture(scope="module")
def errors_in_bfloat16():
    """Gives the relative errors of results and gradients, by ranks and strategy."""
    # One key head: Ulysses repeats it, and sums its gradients.
    *arrays, grads = split.random_inputs(
        (1, 256, 8, 16), (1, 256, 1, 16), dtype=jnp.bfloat16
    )
    options = dense.Options(is_causal=True, window=(200, 0))
    expected = dense.attention(*arrays, options, grads)

    def errors(size, strategy):
        found = split.attend(*arrays, options, grads, size=size, strategy=strategy)
        assert found.out.dtype == jnp.bfloat16
        pairs = zip(found[:5], expected[:5], strict=True)
        return np.array(
            [
                np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2) / np.mean(b**2))
                for a, b in pairs
            ]
        )

    return errors, errors(1, "ring")


@pytest.mark.parametrize("strategy", ["ring", "ulysses", Usp(4)], ids=str)
def test_the_error_in_bfloat16_is_that_of_one_device(errors_in_bfloat16, strategy):
    errors, alone = errors_in_bfloat16
    ratios = errors(8, strategy) / alone
    # The residual is float32 already; its error is all rounding noise.
    assert np.delete(ratios, 1).max() <= 1.05, ratios
    assert ratios[1] < 3, ratios
