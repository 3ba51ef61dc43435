"""FlashAttention-3 in every strategy, with a stand-in for its targets on the CPU.

The stand-in takes and refuses what the targets do, and leaves NaN where they leave
anything. So what is shown is all that surrounds the kernel, against float64.
"""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

import jaxcomm
from jaxcomm.attention.kernels.flash import kernel as flash
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.kernels.selection import select
from jaxcomm.attention.kernels.xla.kernel import XLA
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.pairs import Block, Pairs, Run

pytestmark = pytest.mark.usefixtures("called")

# Of bfloat16, relative to the largest number.
LIMIT = 0.03
HEADS = (4, 2, 8)


def _arrays(batch, tokens, seed=0, sizes=HEADS[2:] * 2):
    """Return bfloat16 query, key and value, and gradients of output and residual."""
    heads, key_heads, _ = HEADS
    rng = np.random.default_rng(seed)
    of_key, of_value = sizes
    kinds = [(heads, of_key), (key_heads, of_key), (key_heads, of_value)]
    shapes = [(batch, tokens, *kind) for kind in (*kinds, (heads, of_value))]
    *arrays, grad = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    return arrays, (grad, np.zeros((batch, tokens, heads), np.float32))


def _compare(options, batch=1, tokens=48, **how):
    arrays, grads = _arrays(batch, tokens)
    split.compare(*arrays, options, grads, LIMIT, **how)


def _documents(*rows, tokens=48):
    """Return the ids of documents of these lengths; the rest of a row is padding."""
    return np.stack([jaxcomm.attention.segment_ids_of(row, tokens) for row in rows])


CAUSAL = Options(is_causal=True)
FLASH = {"implementation": "flash"}


@pytest.mark.parametrize(
    ("size", "schedule", "strategy", "options"),
    [
        (2, "zigzag", "ring", CAUSAL),
        (4, "zigzag", "ring", CAUSAL),
        (4, "contiguous", "ring", CAUSAL),
        (4, "striped", "ring", CAUSAL),
        (2, "zigzag", "ring", Options()),
        (4, "zigzag", "all_gather", CAUSAL),
        (4, "contiguous", "all_gather", Options(is_causal=True, window=(9, 0))),
        (2, "zigzag", "all_gather", Options(is_causal=True, window=(9, 0))),
        (2, "zigzag", "ulysses", CAUSAL),
        (2, "zigzag", "ulysses", Options(window=(9, 4))),
        (2, "contiguous", "halo", Options(is_causal=True, window=(9, 0))),
        (4, "contiguous", "halo", Options(is_causal=True, window=(9, 0))),
        (4, "contiguous", "halo", Options(is_causal=True, window=(29, 0))),
    ],
)
def test_masks_equal_float64(called, size, schedule, strategy, options):
    how = FLASH | {"size": size, "schedule": schedule, "strategy": strategy}
    _compare(options, 2, **how)
    assert {"forward", "backward"} <= set(called)


@pytest.mark.parametrize(
    ("sizes", "has_residual", "ids"),
    [((16, 8), True, [30, 18]), ((16, 8), False, None), ((8, 16), False, None)],
)
def test_values_may_have_heads_of_another_size(called, sizes, has_residual, ids):
    arrays, (grad, _) = _arrays(1, 48, sizes=sizes)
    grads = grad, np.full((1, 48, 4), 0.1 * has_residual, np.float32)
    options = Options(
        is_causal=True, query_ids=None if ids is None else _documents(ids)
    )
    how = FLASH | {"size": 2, "return_residual": has_residual}
    split.compare(*arrays, options, grads, LIMIT, **how)
    assert {"forward", "backward"} <= set(called)


def _rows(*rows):
    """Return three rows: what is told once is told three times."""
    return np.broadcast_to(_documents(*rows), (3, 48))


# Cut by every border, with padding; whole documents on each of four ranks.
CUT = _documents([5, 1, 30, 9])
DOCUMENTS = [
    _rows([5, 1, 30, 9], [48], [3] * 16),
    _rows([12, 5, 7, 4, 8, 12]),
    # Numbers that come again, and none that ascend.
    np.tile(np.repeat([3, 1, 3, 0], 12), (3, 1)).astype(np.int32),
    # The number that padding gets where documents are looked up.
    np.where(_rows([30]) < 0, -1, 2**31 - 2).astype(np.int32),
]


# Not as rows of one batch: one row may have all go another way.
@pytest.mark.parametrize(
    ("schedule", "strategy", "window", "is_causal"),
    [
        ("zigzag", "ring", None, True),
        ("zigzag", "ring", None, False),
        # Contiguous: see test_ways.py.
        # What a rank sees of the keys of others is no rectangle.
        ("striped", "ring", None, True),
        # Of gathered keys zigzag shows more, and test_ways.py has contiguous ones.
        pytest.param(
            "contiguous", "all_gather", None, True, marks=pytest.mark.thorough
        ),
        ("zigzag", "all_gather", (9, 0), True),
        ("zigzag", "ulysses", None, True),
        ("contiguous", "halo", (9, 0), True),
    ],
)
def test_documents_equal_float64(called, schedule, strategy, window, is_causal):
    arrays, grads = _arrays(3, 48)
    each = [
        Options(is_causal=is_causal, window=window, query_ids=ids) for ids in DOCUMENTS
    ]
    how = {"size": 2, "schedule": schedule, "strategy": strategy}
    split.compare_each(*arrays, each, grads, LIMIT, **how, **FLASH)
    assert {"forward", "backward"} <= set(called)


@pytest.mark.parametrize(
    ("schedule", "strategy", "window", "ids"),
    [
        ("zigzag", "ring", None, None),
        ("zigzag", "all_gather", None, None),
        ("contiguous", "halo", (9, 0), None),
        ("contiguous", "halo", (24, 0), _documents([30, 18])),
    ],
)
def test_without_a_residual_it_makes_its_own_delta(
    called, schedule, strategy, window, ids
):
    """A ring of documents: see test_ways.py."""
    options = Options(is_causal=True, window=window, query_ids=ids)
    how = {"size": 2, "schedule": schedule, "strategy": strategy}
    _compare(options, return_residual=False, **how, **FLASH)
    assert {"forward", "backward"} <= set(called)


def test_one_sequence_with_ids_is_served_in_plain_jit(called):
    arrays, _ = _arrays(1, 48)
    out = jaxcomm.dot_product_attention(
        *arrays, sharding=split.over_ring(2), is_causal=True,
        segment_ids=CUT, strategy="all_gather", **FLASH,
    )  # fmt: skip
    options = Options(is_causal=True, query_ids=CUT)
    split.assert_close([out], dense.attention(*arrays, options), LIMIT)
    assert set(called) == {"forward"}


@pytest.mark.parametrize(
    ("strategy", "is_causal"), [("all_gather", True), ("ulysses", False)]
)
def test_padding_sees_nothing(called, strategy, is_causal):
    how = {"size": 2, "schedule": "zigzag", "strategy": strategy}
    # So few that one more key shows.
    _compare(Options(is_causal=is_causal), tokens=5, **how)
    ids = _documents([20, 25], tokens=45)
    _compare(Options(is_causal=is_causal, query_ids=ids), tokens=45, **how)
    assert {"forward", "backward"} <= set(called)


def test_rows_with_positions_of_their_own_are_left_to_others(called):
    """Under vmap. What the kernel is told holds for all rows."""
    rows = Coordinates(jax.ShapeDtypeStruct((2, 4), jnp.int32))
    block = Block((0, 4), (0, 4), right=0)
    x = jax.ShapeDtypeStruct((2, 4, 1, 8), jnp.bfloat16)
    run = Run((0, 4), (0, 4))
    pairs = Pairs(Mask(None, 0, 4, 4), rows, rows, blocks=(block,), runs=(run,))
    kernels = flash.FLASH, XLA
    hop = Hop(Scores(1.0), pairs, x, x, x, platform="cpu", kernels=kernels)
    assert select(hop) is XLA
    shared = Coordinates(jax.ShapeDtypeStruct((4,), jnp.int32))
    hop = hop.with_pairs(queries=shared, keys=shared)
    assert select(hop) is flash.FLASH
    # Its numbers of elements have 32 bits.
    long = jax.ShapeDtypeStruct((2, 2**23, 1, 8), jnp.bfloat16)
    assert select(hop.replace(query=long)) is XLA
