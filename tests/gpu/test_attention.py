"""Options and strategies on all GPUs, by whatever kernel serves, against float64.

Each strategy meets what it treats in its own way, and each kernel what it serves.
"""

import functools

import dense
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

from jaxcomm.attention.kernels.flash import kernel as flash

pytestmark = pytest.mark.gpu

# Of documents that borders cut, the last in padding, as parts of a sequence.
DOCUMENTS = (0.3, 0.45, 0.9)


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _ids(tokens):
    ids = np.searchsorted(np.multiply(DOCUMENTS, tokens), np.arange(tokens), "right")
    return np.where(ids < len(DOCUMENTS), ids, -1)[None].astype(np.int32)


def _options(tokens, heads):
    causal = functools.partial(Options, is_causal=True)
    ids, window = _ids(tokens), (tokens // 5, 0)
    return {
        "causal": causal(),
        "plain": Options(),
        "window": causal(window=window),
        "both sides": Options(window=(tokens // 5, tokens // 7)),
        "documents": causal(query_ids=ids),
        "all of a document": Options(query_ids=ids),
        "window in documents": causal(window=window, query_ids=ids),
        "lengths": causal(
            query_lengths=np.array([tokens - 5]), key_lengths=np.array([tokens - 5])
        ),
        "sinks": causal(sinks=_normal(heads)),
        "bias": causal(bias=_normal(1, heads, tokens, tokens)),
        "many": Options(
            window=window, query_ids=ids, cap=2.0, slopes=_normal(heads),
            sinks=_normal(heads), mask=_normal(1, heads, tokens, tokens) > -1,
        ),
    }  # fmt: skip


# Strategy, schedule, options, and whether FlashAttention-3 can serve each hop.
CASES = [
    ("ring", "zigzag", "causal", True),
    ("ring", "striped", "sinks", True),
    ("ring", "contiguous", "documents", True),
    ("ring", "zigzag", "lengths", False),
    ("ring", "contiguous", "window", False),
    ("ring", "zigzag", "bias", False),
    ("ring", "striped", "many", False),
    ("all_gather", "zigzag", "causal", True),
    ("all_gather", "zigzag", "window in documents", True),
    ("all_gather", "contiguous", "all of a document", True),
    ("all_gather", "striped", "many", False),
    ("halo", "contiguous", "window", True),
    ("halo", "contiguous", "window in documents", True),
    ("halo", "zigzag", "both sides", False),
    ("ulysses", "zigzag", "plain", True),
    ("ulysses", "contiguous", "window in documents", True),
    ("ulysses", "zigzag", "many", False),
]


@pytest.mark.parametrize(("strategy", "schedule", "name", "is_flash"), CASES)
def test_attention_equals_float64(ring, gpus, strategy, schedule, name, is_flash):
    if not gpus and name not in ("documents", "both sides"):
        pytest.skip("tests/attention/test_options.py has the same without a GPU")
    tokens, heads, head_size = (768, 8, 64) if gpus else (20, 4, 8)
    shapes = (1, tokens, heads, head_size), (1, tokens, 2, head_size)
    *arrays, grads = split.inputs(*shapes, dtype=jnp.bfloat16)
    options = _options(tokens, heads)[name]
    # Kernels treat the gradient of a residual apart: every other case has one.
    has_residual = len(strategy + schedule + name) % 2 == 0
    grads = grads[0], grads[1] * float(has_residual)
    # By name it must serve all hops.
    has_flash = bool(gpus) and flash.why_not_on(gpus) is None
    found = split.attend(
        *arrays, options, grads, size=ring.size, schedule=schedule,
        strategy=strategy, return_residual=has_residual,
        implementation="flash" if has_flash and is_flash else None,
    )  # fmt: skip
    dense.assert_within_limits(found, dense.attention(*arrays, options, grads))
