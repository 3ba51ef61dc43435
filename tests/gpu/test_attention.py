"""Options and strategies on all GPUs, by whatever kernel serves, against float64.

Each strategy meets what it treats in its own way, and each kernel what it serves.
"""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

from jaxcomm.attention import Ranges
from jaxcomm.attention.kernels.flash import kernel as flash

pytestmark = pytest.mark.gpu

# Where documents end, as parts of a sequence. Borders cut them, the last in padding; or
# cut a short one.
DOCUMENTS, SHORT = (0.3, 0.45, 0.9), (0.24, 0.49, 0.51, 0.76, 1)


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _ids(tokens, ends=DOCUMENTS):
    ids = np.searchsorted(np.multiply(ends, tokens), np.arange(tokens), "right")
    return np.where(ids < len(ends), ids, -1)[None].astype(np.int32)


def _prefix(tokens):
    """A third of the tokens all see each other; others see all before them."""
    at = np.arange(tokens)[None]
    return np.zeros_like(at), np.maximum(at + 1, tokens // 3)


def _tree(tokens):
    """Of a trunk and two branches a token is seen until its own ends."""
    ends = np.array([tokens, tokens * 2 // 3, tokens])
    number = np.searchsorted([tokens // 4, tokens * 2 // 3], np.arange(tokens), "right")
    return np.zeros((1, tokens), int), ends[number][None]


def _options(tokens, heads):
    causal = functools.partial(Options, is_causal=True)
    ids, window = _ids(tokens), (tokens // 5, 0)
    return {
        "causal": causal(),
        "plain": Options(),
        "window": causal(window=window),
        "both sides": Options(window=(tokens // 5, tokens // 7)),
        "documents": causal(query_ids=ids),
        "short documents": causal(query_ids=_ids(tokens, SHORT)),
        "all of a document": Options(query_ids=ids),
        "window in documents": causal(window=window, query_ids=ids),
        "lengths": causal(
            query_lengths=np.array([tokens - 5]), key_lengths=np.array([tokens - 5])
        ),
        "sinks": causal(sinks=_normal(heads)),
        "bias": causal(bias=_normal(1, heads, tokens, tokens)),
        "prefix": Options(mask=Ranges(keys=_prefix(tokens))),
        "tree": causal(query_ids=ids, mask=Ranges(queries=_tree(tokens))),
        "many": Options(
            window=window, query_ids=ids, cap=2.0, slopes=_normal(heads),
            sinks=_normal(heads), mask=_normal(1, heads, tokens, tokens) > -1,
        ),
    }  # fmt: skip


# Strategy, schedule, options, and a kernel that can serve each hop.
CASES = [
    ("ring", "zigzag", "causal", "flash"),
    ("ring", "striped", "sinks", "flash"),
    ("ring", "contiguous", "documents", "flash"),
    ("ring", "contiguous", "short documents", "flash"),
    ("ring", "contiguous", "agreed documents", "flash"),
    ("ring", "zigzag", "lengths", None),
    ("ring", "contiguous", "window", None),
    ("ring", "zigzag", "bias", None),
    ("ring", "striped", "many", None),
    ("ring", "zigzag", "tree", None),
    ("all_gather", "zigzag", "prefix", None),
    ("all_gather", "zigzag", "causal", "flash"),
    ("all_gather", "zigzag", "window in documents", "flash"),
    ("all_gather", "contiguous", "all of a document", "flash"),
    ("all_gather", "striped", "many", None),
    ("halo", "contiguous", "window", "flash"),
    ("halo", "contiguous", "window in documents", "flash"),
    ("halo", "contiguous", "agreed window in documents", "flash"),
    ("halo", "contiguous", "window", "cudnn"),
    ("halo", "zigzag", "both sides", None),
    ("ulysses", "zigzag", "plain", "flash"),
    ("ulysses", "contiguous", "window in documents", "flash"),
    ("ulysses", "zigzag", "many", None),
    ("ulysses", "zigzag", "tree", None),
    # Heads of multi-head latent attention.
    ("ring", "zigzag", "latent causal", "cudnn"),
    ("ring", "contiguous", "latent documents", "flash"),
    ("halo", "contiguous", "latent window", "cudnn"),
]
# Every strategy, and what is sent beside keys and values.
BETWEEN_PROCESSES = (
    "causal", "documents", "agreed documents", "window in documents",
    "agreed window in documents", "latent causal",
)  # fmt: skip


@pytest.mark.parametrize(("strategy", "schedule", "name", "kernel"), CASES)
def test_attention_equals_float64(ring, gpus, strategy, schedule, name, kernel):
    if not gpus and name not in ("documents", "both sides"):
        pytest.skip("tests/attention/test_options.py has the same without a GPU")
    if jax.process_count() > 1 and name not in BETWEEN_PROCESSES:
        pytest.skip("one process does it")
    tokens, heads, head_size = (768, 8, 64) if gpus else (20, 4, 8)
    value_size = head_size
    if name.startswith("latent "):
        head_size, value_size = 192, 128
    shapes = (1, tokens, heads, head_size), (1, tokens, 2, head_size)
    *arrays, grads = split.inputs(*shapes, dtype=jnp.bfloat16, value_size=value_size)
    kind = name.removeprefix("latent ").removeprefix("agreed ")
    options = _options(tokens, heads)[kind]
    # Kernels treat the gradient of a residual apart: every other case has one.
    has_residual = len(strategy + schedule + name) % 2 == 0 and kernel != "cudnn"
    grads = grads[0], grads[1] * float(has_residual)
    # By name it must serve all hops.
    if not gpus or (kernel == "flash" and flash.why_not_on(gpus) is not None):
        kernel = None
    found = split.attend(
        *arrays, options, grads, size=ring.size, schedule=schedule,
        strategy=strategy, return_residual=has_residual,
        implementation=kernel, agrees=name.startswith("agreed"),
    )  # fmt: skip
    dense.assert_within_limits(found, dense.attention(*arrays, options, grads))
