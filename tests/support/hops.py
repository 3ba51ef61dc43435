"""Hops with every option, for kernels to be compared with each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.kernel import Hop, Kernel, Saved
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.kernels.selection import KERNELS
from jaxcomm.attention.mask import Coordinates, Mask, Range
from jaxcomm.attention.pairs import Pairs


@dataclasses.dataclass(frozen=True)
class Case:
    """A hop; ``documents`` are drawn for each sequence of the batch.

    So are ``ranges`` of what ``"queries"`` or ``"keys"`` may see.
    """

    batch: int = 1
    queries: int = 48
    keys: int = 48
    heads: int = 2
    key_heads: int = 2
    head_size: int = 16
    value_size: int = 16
    left: int | None = None
    right: int | None = None
    padding: int = 0
    documents: int = 0
    ranges: tuple[str, ...] = ()
    has_slopes: bool = False
    bias: tuple[int, int, int] | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    dtype: str = "bfloat16"


CASES = (
    Case(),
    Case(right=0, key_heads=1),
    Case(batch=2, queries=50, keys=70, head_size=24, value_size=40, left=20, right=0),
    Case(left=5, right=3, padding=9),
    Case(batch=2, queries=50, keys=70, right=0, documents=4, dtype="float16"),
    Case(right=0, has_slopes=True, soft_cap=5.0),
    Case(batch=2, heads=4, right=0, documents=3, has_slopes=True, dropout_rate=0.3),
    Case(queries=16, keys=64, left=10, right=10, soft_cap=2.0, dropout_rate=0.1),
    Case(heads=4, key_heads=2, right=0, bias=(1, 4, 48), dtype="float32"),
    Case(batch=2, queries=50, keys=70, bias=(2, 1, 50), soft_cap=3.0, documents=3),
    Case(batch=2, heads=4, key_heads=2, right=0, bias=(1, 4, 1), dropout_rate=0.2),
    Case(queries=40, keys=64, bias=(1, 1, 40), has_slopes=True),
    Case(batch=2, queries=50, keys=70, right=0, ranges=("keys",), has_slopes=True),
    Case(batch=2, heads=4, documents=3, left=40, ranges=("queries", "keys")),
)


def hop_of(case: Case):
    random = np.random.default_rng(7)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), case.dtype)

    def ids(length):
        if not case.documents:
            return None
        drawn = random.integers(-1, case.documents, (case.batch, length))
        return jnp.asarray(np.sort(drawn, 1), jnp.int32)

    def range_of(side, tokens, others):
        if side not in case.ranges:
            return None
        # Of some tokens nothing is left; of others, in a row, all that a tile has.
        first = np.sort(random.integers(0, others // 2, (case.batch, tokens)), 1)
        end = first + random.integers(0, others, (case.batch, tokens))
        return Range(jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32))

    of_heads = case.batch, case.heads
    bias = normal(*case.bias, case.keys) if case.bias else None
    slopes = random.random(of_heads) if case.has_slopes else None
    seeds = random.integers(0, 2**32, of_heads) if case.dropout_rate else None
    lengths = case.queries + 3 - case.padding, case.keys - case.padding
    pairs = Pairs(
        Mask(case.left, case.right, *lengths),
        queries=Coordinates(
            jnp.arange(case.queries) + 3,
            ids(case.queries),
            range_of("queries", case.queries, case.keys),
        ),
        keys=Coordinates(
            jnp.arange(case.keys),
            ids(case.keys),
            range_of("keys", case.keys, case.queries),
        ),
        segments=((case.queries,), (case.keys,)),
    )
    hop = Hop(
        query=normal(case.batch, case.queries, case.heads, case.head_size),
        key=normal(case.batch, case.keys, case.key_heads, case.head_size),
        value=normal(case.batch, case.keys, case.key_heads, case.value_size),
        scores=Scores(
            scale=case.head_size**-0.5,
            bias=bias,
            slopes=None if slopes is None else jnp.asarray(slopes, "float32"),
            seeds=None if seeds is None else jnp.asarray(seeds, "uint32"),
            soft_cap=case.soft_cap,
            dropout_rate=case.dropout_rate,
        ),
        pairs=pairs,
        has_residual=True,
        kernels=KERNELS,
    )
    return hop, normal(case.batch, case.queries, case.heads, case.value_size)


def run(kernel: Kernel, case: Case, dtype=None):
    """Return output, residual and gradients, computed with inputs cast to a dtype."""
    hop, grad = hop_of(case)
    if dtype is not None:
        names = "query", "key", "value"
        hop = hop.replace(**{name: getattr(hop, name).astype(dtype) for name in names})
        grad = grad.astype(dtype)
    return both(hop.replace(kernels=(kernel,)), grad)


@jax.jit
def both(hop: Hop, grad):
    out, lse = hop_forward(hop)
    delta = (grad.astype(out.dtype) * out).sum(-1) - (0.25 if hop.has_residual else 0.0)
    # As if there were other keys, too.
    saved = Saved(grad, out.astype(grad.dtype), lse + 0.5, delta)
    return out, lse, hop_backward(hop, saved)
