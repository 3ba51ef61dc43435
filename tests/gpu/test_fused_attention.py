"""cuDNN's attention in the ring, on one NVIDIA GPU or several, against float64.

A ring of four needs four devices, so most cases go through its hops on one: the hop
functions, the merge and the sums of the ring, for every rank and every block, without
the sends. Without a GPU XLA computes both in tiny sizes.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.cudnn import support
from jaxcomm.attention.kernels.hop import Hop, Saved
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import kernels_for
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.merge import merge
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.visibility import blocks_of

pytestmark = pytest.mark.gpu

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
# Root mean square of the error, relative to that of the result. A bfloat16 output of
# the kernel and a float32 ring give 2.5e-3 of the output for every number of ranks; the
# kernel rounds weights and gradients of scores as well. The residual is float32.
LIMITS = {"out": 4e-3, "lse": 1e-4} | dict.fromkeys(NAMES[2:], 1e-2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A ring.

    Attributes:
      schedule: its schedule; a name with "!" is not causal.
      size: its ranks.
      tokens, key_tokens: of each rank.
      heads, key_heads, head_size: of the attention.
      residual: whether the residual has a gradient too.
      left: how many tokens before its own a query sees, or None for all.
      dtype: of the inputs.
    """

    schedule: str = "zigzag"
    size: int = 4
    tokens: int = 192
    key_tokens: int | None = None
    heads: int = 4
    key_heads: int = 4
    head_size: int = 64
    residual: bool = False
    left: int | None = None
    dtype: str = "bfloat16"

    @property
    def is_causal(self):
        return not self.schedule.startswith("!")

    @property
    def dealer(self):
        return SCHEDULES[self.schedule.strip("!")]

    def __str__(self):
        fields = dataclasses.fields(self)
        changed = [f for f in fields if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "plain"


HOPS = (
    *(
        Case(heads=8, key_heads=key_heads, head_size=head_size, residual=residual)
        for key_heads in (8, 2)
        for head_size in (64, 128)
        for residual in (False, True)
    ),
    Case(tokens=129, residual=True),
    Case(head_size=256, tokens=128),
    Case(head_size=72, dtype="float16", residual=True),
    Case("contiguous", key_heads=1),
    Case("striped", tokens=129, key_heads=2),
    Case("striped", head_size=128, residual=True),
    Case("!zigzag", key_tokens=64, key_heads=2, residual=True),
)
RINGS = tuple(
    Case(schedule, key_heads=2, residual=residual, head_size=128)
    for schedule in ("zigzag", "!zigzag")
    for residual in (False, True)
)

WINDOWS = tuple(
    Case("contiguous", 1, 2500, key_heads=key_heads, head_size=size, left=left)
    for key_heads, size, left in ((2, 128, 1023), (4, 64, 1500), (2, 128, 2499))
)


def inputs_of(case):
    """Return query, key, value and the gradients of output and residual."""
    rng = np.random.default_rng(0)
    queries = case.size * case.tokens
    keys = case.size * (case.key_tokens or case.tokens)
    shape = (1, queries, case.heads, case.head_size)
    key_shape = (1, keys, case.key_heads, case.head_size)

    def normal(shape, dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arrays = [normal(s, case.dtype) for s in (shape, key_shape, key_shape)]
    grad_lse = float(case.residual) * normal(shape[:3], "float32")
    return arrays, (normal(shape, case.dtype), grad_lse)


def dense(case, arrays, grads):
    """Compute all of NAMES in float64, in natural order."""
    group, scale = case.heads // case.key_heads, case.head_size**-0.5
    # NumPy: it compiles nothing. Heads before tokens.
    wide = [np.asarray(x, np.float64).swapaxes(1, 2) for x in (*arrays, *grads)]
    query, key, value, grad_out, grad_lse = wide
    key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = scale * query @ key.swapaxes(2, 3)
    if case.is_causal:
        scores[..., ~np.tri(*scores.shape[2:], dtype=bool)] = -np.inf
    if case.left is not None:
        hidden = np.tri(*scores.shape[2:], k=-case.left - 1, dtype=bool)
        scores[..., hidden] = -np.inf
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    out, lse = weights @ value, (top + np.log(total))[..., 0]
    delta = (grad_out * out).sum(-1) - grad_lse
    grad_scores = grad_out @ value.swapaxes(2, 3) - delta[..., None]
    grad_scores *= scale * weights
    grad_key = grad_scores.swapaxes(2, 3) @ query
    grad_value = weights.swapaxes(2, 3) @ grad_out
    shape = (key.shape[0], case.key_heads, group, *key.shape[2:])
    summed = [x.reshape(shape).sum(2) for x in (grad_key, grad_value)]
    results = (out, lse, grad_scores @ key, *summed)
    return [x.swapaxes(1, 2) for x in results]


def through_hops(case, arrays, grads, implementation="cudnn"):
    """Compute all of NAMES with the ring's hops, every rank on this device."""
    size, tokens = case.size, case.tokens
    keys = case.key_tokens or tokens
    layouts = tuple(Layout(case.dealer, size, size * n) for n in (tokens, keys))
    mask = Mask(None, 0 if case.is_causal else None, size * tokens, size * keys)
    blocks = blocks_of(*layouts, mask, keys)
    blocks = blocks.same, blocks.later, blocks.earlier
    known = Hop(
        scale=case.head_size**-0.5,
        mask=mask,
        query_segments=case.dealer.segments(tokens),
        key_segments=case.dealer.segments(keys),
        kernels=kernels_for(implementation),
        blocks=tuple(dict.fromkeys(blocks)),
        has_residual=case.residual,
    )
    deal = functools.partial(_deal, case.dealer, size)
    (query, grad_out, grad_lse), (key, value) = (
        deal((arrays[0], *grads), tokens),
        deal(arrays[1:], keys),
    )

    def hop_of(rank, source, *arrays):
        queries = case.dealer.positions(rank, size, tokens)
        of_keys = case.dealer.positions(source, size, keys)
        which = [known.blocks.index(block) for block in blocks]
        kind = jnp.sign(of_keys[0] - queries[0])  # 1 is later, and -1 earlier: the last
        return known.replace(
            **dict(zip(("query", "key", "value"), arrays, strict=True)),
            queries=Coordinates(queries),
            keys=Coordinates(of_keys),
            block=jnp.asarray(which, jnp.int32)[kind],
        )

    # One program for all ranks and hops, as in a ring.
    @jax.jit
    def forward(rank, source, merged, query, key, value):
        return merge(*merged, *hop_forward(hop_of(rank, source, query, key, value)))

    @jax.jit
    def backward(rank, source, query, key, value, grad_out, lse, delta, out):
        saved = Saved(grad_out, out, lse, delta)
        return hop_backward(hop_of(rank, source, query, key, value), saved)[:3]

    found = {name: [] for name in NAMES[:3]}
    grad_keys = [jnp.zeros(key[0].shape)] * size
    grad_values = list(grad_keys)
    for rank in range(size):
        merged = (
            jnp.zeros(query[0].shape, jnp.float32),
            jnp.full(query[0].shape[:3], -jnp.inf, jnp.float32),
        )
        for hop in range(size):
            at = (rank - hop) % size
            merged = forward(rank, at, merged, query[rank], key[at], value[at])
        out, lse = merged[0].astype(case.dtype), merged[1]
        delta = (grad_out[rank].astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
        delta -= grad_lse[rank]
        grad_query = jnp.zeros(query[0].shape)
        for hop in range(size):
            at = (rank - hop) % size
            block = (query[rank], key[at], value[at], grad_out[rank], lse, delta, out)
            added = backward(rank, at, *block)
            grad_query += added[0]
            grad_keys[at] += added[1]
            grad_values[at] += added[2]
        for name, x in zip(NAMES[:3], (out, lse, grad_query), strict=True):
            found[name].append(x)
    gather = functools.partial(_gather, case.dealer, size)
    return [gather(x) for x in (*found.values(), grad_keys, grad_values)]


def _deal(dealer, size, arrays, tokens):
    order = dealer.shard(size, tokens)
    return [jnp.split(x[:, order], size, 1) for x in arrays]


def _gather(dealer, size, blocks):
    order = dealer.unshard(size, blocks[0].shape[1])
    return np.concatenate([np.asarray(x, np.float64) for x in blocks], 1)[:, order]


def through_ring(case, arrays, grads, implementation="cudnn"):
    """Compute all of NAMES with ring_attention over ``case.size`` devices.

    Raises:
      AssertionError: its program does not call cuDNN, and is to.
    """
    mesh = jax.make_mesh((case.size,), ("context",), devices=jax.devices()[: case.size])
    split = jax.P(None, "context")
    layout, key_layout = (
        Layout(case.dealer, case.size, x.shape[1]) for x in arrays[:2]
    )
    attend = functools.partial(
        ring_attention,
        axis_name="context",
        tokens=Tokens(layout, TRUSTED),
        key_tokens=None if key_layout == layout else Tokens(key_layout, TRUSTED),
        is_causal=case.is_causal,
        local_window_size=None if case.left is None else (case.left, 0),
        return_residual=case.residual,
        implementation=implementation,
        backend="xla",
    )

    whole = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)

    @jax.jit
    def run(arrays, grads):
        out, transpose = jax.vjp(whole, *arrays)
        gradients = transpose(grads if case.residual else grads[0])
        # The residual is not returned without its gradient: then the oracle's is right.
        return *(out if case.residual else (out, None)), *gradients

    order = case.dealer.shard(case.size, case.tokens)
    back = np.argsort(order)
    dealt = jax.device_put(
        jax.tree.map(lambda x: x[:, order], (arrays, grads)),
        jax.NamedSharding(mesh, split),
    )
    calls_cudnn = "__cudnn$fmha" in run.lower(*dealt).as_text()
    assert calls_cudnn == (implementation != "xla")
    return [
        None if x is None else np.asarray(x, np.float64)[:, back] for x in run(*dealt)
    ]


def errors_of(case, through):
    """Return for each of NAMES the error relative to the result, both as RMS."""
    arrays, grads = inputs_of(case)
    expected = dense(case, arrays, grads)
    errors = {}
    for name, found, right in zip(
        NAMES, through(case, arrays, grads), expected, strict=True
    ):
        if found is None:
            continue
        assert found.shape == right.shape, name
        rms = np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2))
        errors[name] = float(rms)
    return errors


def beyond(errors):
    """Return those beyond their limit; NaN is beyond any."""
    return {name: e for name, e in errors.items() if not e <= LIMITS[name]}


@pytest.fixture
def cudnn():
    """Skips where cuDNN serves no GPU."""
    reason = "no NVIDIA GPU"
    if jax.default_backend() == "gpu":
        reason = support.fused_attention_reason()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("case", HOPS, ids=str)
def test_hops_of_a_ring_equal_float64(case, cudnn):
    errors = errors_of(case, through_hops)
    assert not beyond(errors), errors


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_rings_of_one_and_of_all_devices_equal_float64(case, cudnn):
    for size in sorted({1, min(4, len(jax.devices()))}):
        errors = errors_of(dataclasses.replace(case, size=size), through_ring)
        assert not beyond(errors), errors


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_windows_equal_float64(case, cudnn):
    errors = errors_of(case, through_ring)
    assert not beyond(errors), errors


def test_inputs_that_cudnn_does_not_take_are_computed_by_xla(cudnn):
    case = Case(size=1, dtype="float32")
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    layout = Layout("zigzag", 1, case.tokens)
    local = functools.partial(
        ring_attention, axis_name="context", tokens=layout, is_causal=True
    )
    split = jax.P(None, "context")
    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    arrays, _ = inputs_of(case)
    arrays = jax.device_put(arrays, jax.NamedSharding(mesh, split))
    # It says once that it does so.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*XLA computes this tile by tile")
        assert "cudnn" not in whole.lower(*arrays).as_text()


@pytest.mark.parametrize("through", [through_hops, through_ring])
def test_xla_computes_the_same_in_tiny_sizes(through):
    size = min(2, len(jax.devices()))
    tiny = Case(size=size, tokens=12, head_size=8, residual=True)
    errors = errors_of(tiny, functools.partial(through, implementation="xla"))
    assert not beyond(errors), errors
