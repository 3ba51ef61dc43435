"""Every option on every strategy and schedule, against dense attention in float64."""

import dataclasses
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
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.strategies.registry import STRATEGIES
from jaxcomm.attention.strategies.usp import Usp

BATCH, TOKENS, HEADS, KEY_HEADS = 2, 37, 8, 2
SIZES = (1, 2, 3, 4, 8)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles in few tokens."""
    loop = tile_loops.TileLoop(4, tile_loops.over_visible)
    monkeypatch.setattr(tile_loops, "ON_CPU", loop)
    monkeypatch.setattr(tiling, "_FEWEST_QUERIES", 4)


def _documents(seed, tokens=TOKENS):
    """Documents of random lengths, of which the last tokens are padding."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, tokens, (BATCH, 3)), 1)
    ids = (np.arange(tokens) >= cuts[:, :, None]).sum(1).astype(np.int32)
    ids[:, -2:] = -1
    return ids


def _normal(*shape):
    rng = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


OPTIONS = {
    "nothing": dense.Options(),
    "causal": dense.Options(is_causal=True),
    "window": dense.Options(window=(6, 3)),
    "causal window": dense.Options(is_causal=True, window=(5, 9)),
    "documents": dense.Options(is_causal=True, query_ids=_documents(0)),
    "documents, both directions": dense.Options(query_ids=_documents(1)),
    "window in documents": dense.Options(
        is_causal=True, window=(4, 0), query_ids=_documents(2)
    ),
    "padding": dense.Options(
        query_lengths=np.array([30, 0]), key_lengths=np.array([21, 37])
    ),
    "causal padding": dense.Options(
        is_causal=True, query_lengths=np.array([30, 37]), key_lengths=np.array([3, 37])
    ),
    "sinks": dense.Options(is_causal=True, sinks=_normal(HEADS)),
    "sinks of empty rows": dense.Options(
        window=(2, 0), query_ids=_documents(3), sinks=_normal(HEADS)
    ),
    "cap": dense.Options(is_causal=True, cap=0.7),
    "bias": dense.Options(is_causal=True, bias=_normal(BATCH, HEADS, TOKENS, TOKENS)),
    "bias of rows": dense.Options(bias=_normal(1, 1, TOKENS, TOKENS)),
    "bias of keys": dense.Options(window=(9, 9), bias=_normal(1, HEADS, 1, TOKENS)),
    "alibi": dense.Options(is_causal=True, slopes=2.0 ** -jnp.arange(1, HEADS + 1.0)),
    "all": dense.Options(
        window=(11, 2),
        query_ids=_documents(4),
        key_lengths=np.array([20, 36]),
        sinks=_normal(HEADS),
        cap=2.0,
        bias=_normal(BATCH, 1, TOKENS, TOKENS),
        slopes=_normal(HEADS),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    option: str
    strategy: str
    schedule: str
    size: int

    def __str__(self):
        return f"{self.option}-{self.strategy}-{self.schedule}-{self.size}"

    @property
    def is_legal(self):
        options = OPTIONS[self.option]
        if self.strategy == "halo":
            return options.window is not None
        if self.strategy == "usp":
            return self.size in (4, 8)
        return self.strategy != "ulysses" or self.size != 3


# What another strategy than the ring could get wrong by itself.
_ELSEWHERE = (
    "causal",
    "window in documents",
    "causal window",
    "bias",
    "bias of keys",
    "all",
)


def _catalogue():
    """Every option on the ring, and what other strategies treat in their own way.

    Schedules and sizes take turns.
    """
    cases = []
    for place, strategy in enumerate(sorted(STRATEGIES)):
        turn = 0
        for option in OPTIONS if strategy == "ring" else _ELSEWHERE:
            schedule = sorted(SCHEDULES)[turn % len(SCHEDULES)]
            for step in range(len(SIZES)):
                size = SIZES[(turn + step + place) % len(SIZES)]
                case = Case(option, strategy, schedule, size)
                if case.is_legal and (size > 1 or strategy == "ring"):
                    cases.append(case)
                    turn += 1
                    break
    return cases


def _inputs(**options):
    shape = (BATCH, TOKENS, HEADS, 8)
    return split.random_inputs(
        shape, (BATCH, TOKENS, KEY_HEADS, 8), value_size=12, **options
    )


def _strategy(case):
    return Usp(2) if case.strategy == "usp" else case.strategy


@pytest.mark.parametrize("case", _catalogue(), ids=str)
def test_options_equal_dense_attention_with_all_gradients(case):
    *arrays, grads = _inputs()
    options = OPTIONS[case.option]
    found = split.attend(
        *arrays,
        options,
        grads,
        size=case.size,
        schedule=case.schedule,
        strategy=_strategy(case),
    )
    # A row that sees nothing has no residual to be differentiated.
    expected = dense.attention(*arrays, options, grads)
    split.assert_close(found, expected, 1e-5)
    empty = np.isneginf(expected.lse)
    assert (np.asarray(found.out)[empty] == 0).all()
    assert (np.asarray(found.grad_query)[empty] == 0).all()
    assert np.isneginf(np.asarray(found.lse)[empty]).all()


def test_the_catalogue_meets_every_size_and_schedule_with_every_strategy():
    cases = _catalogue()
    assert {case.strategy for case in cases} == set(STRATEGIES)
    for strategy in STRATEGIES:
        of = [case for case in cases if case.strategy == strategy]
        assert {case.schedule for case in of} == set(SCHEDULES), strategy
    assert {case.size for case in cases} == set(SIZES)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_rows_of_padding_are_zero_and_minus_infinity(mesh_of, strategy):
    """On the ranks, before anything is cut off."""
    layout = jaxcomm.Layout("contiguous", 4, 13)
    x = layout.reorder(np.asarray(_normal(1, 13, 4, 8)))[0] + 1

    def local(x):
        return jaxcomm.ring_attention(
            x,
            x,
            x,
            axis_name="context",
            layout=layout,
            strategy=strategy,
            return_residual=True,
        )

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
        ("contiguous", {"local_window_size": (3, 3)}, 2),
        ("zigzag", {"is_causal": True, "local_window_size": (3, 0)}, 2),
        ("zigzag", {"is_causal": True}, 7),
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
    if options.get("local_window_size") and schedule == "contiguous":
        jaxcomm.finalize()
        jax.block_until_ready(jax.jit(attend("halo"))(x))
        (found,) = jaxcomm.communicators()
        assert found.stats()["bytes"] == 8 * problem.rows["halo"].forward_bytes


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_the_error_in_bfloat16_is_that_of_one_device(strategy):
    """One key head: Ulysses repeats it, and sums its gradients."""
    *arrays, grads = split.random_inputs(
        (1, 256, 8, 16), (1, 256, 1, 16), dtype=jnp.bfloat16
    )
    window = (70, 0) if strategy == "halo" else None
    options = dense.Options(is_causal=True, window=window)
    expected = dense.attention(*arrays, options, grads)

    def errors(size, strategy):
        found = split.attend(*arrays, options, grads, size=size, strategy=strategy)
        pairs = zip(found[:5], expected[:5], strict=True)
        return np.array(
            [
                np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2) / np.mean(b**2))
                for a, b in pairs
            ]
        )

    alone = errors(1, "ring")
    few = errors(
        4 if strategy == "usp" else 2, Usp(2) if strategy == "usp" else strategy
    )
    many = errors(8, Usp(4) if strategy == "usp" else strategy)
    assert (many <= 2.5 * alone + 2e-3).all(), (alone, many)
    # The residual is float32 already; its error is all rounding noise.
    ratios = np.delete(many / few, 1)
    assert ratios.max() <= 1.2, ratios
