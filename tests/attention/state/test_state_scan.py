"""Recurrent layers over split sequences, against one token at a time in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrence import recurrence

import jaxcomm
from jaxcomm.attention import (
    document_layout,
    segment_ids_of,
    state_scan,
)
from jaxcomm.attention.state import (
    GatedDelta,
    KimiDelta,
    Mamba2,
    StateKernel,
    causal_halo,
    maps,
)

SPLIT = jax.P("data", "context")


@dataclasses.dataclass(frozen=True)
class TokenByToken(StateKernel):
    """Somebody else's kernel, which defines no more than it must."""

    name = "token_by_token"
    state = "matrix"
    has_beta = True
    chunk: int = 3

    def run(self, rows, state, kept=None):
        def step(state, of):
            query, key, value, gate, beta, begins = of
            state = jnp.where(begins[:, None, None, None], 0, state)
            state = jnp.exp(gate)[..., None, None] * state
            rest = value - jnp.einsum("pnkv,pnk->pnv", state, key)
            state = state + key[..., None] * (beta[..., None] * rest)[:, :, None]
            return state, rows.scale * jnp.einsum("pnkv,pnk->pnv", state, query)

        of = rows.query, rows.key, rows.value, rows.gate, rows.beta, rows.begins
        state, out = jax.lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in of])
        return jnp.moveaxis(out, 0, 1), state


KERNELS = GatedDelta(4), KimiDelta(32), Mamba2(4), TokenByToken(), KimiDelta(2)


def mesh_of(size, data=1):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (data, size), ("data", "context"), auto, devices=jax.devices()[: data * size]
    )


def drawn(kernel, length, *, strength=0.2, batch=2, heads=2, key_heads=2, seed=0):
    """Return the arrays of a call in natural order, and gradients of its results."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.normal(size=(batch, *shape)).astype(np.float32)

    key = normal(length, key_heads, 4)
    gate = normal(length, heads, *[4] * (kernel.gates == "key"))
    arrays = {
        "query": normal(length, key_heads, 4),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": normal(length, heads, 3),
        "gate": -strength * np.abs(gate),
    }
    if kernel.has_beta:
        arrays["beta"] = 1 / (1 + np.exp(-normal(length, heads)))
    return arrays, normal(length, heads, 3), normal(heads, 4, 3)


def run(kernel, layout, arrays, grads, ids=None, data=1, **options):
    """Return (out, state, gradients) in natural order, of a split sequence."""
    grad_out, grad_state = grads
    (x, of_out), tokens = layout.reorder((arrays, grad_out), segment_ids=ids)
    mesh = mesh_of(layout.size, data)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=SPLIT, out_specs=(SPLIT, jax.P("data"))
    )
    def layer(x, tokens):
        return state_scan(
            x["query"], x["key"], x["value"], x["gate"], "context", tokens,
            kernel=kernel, beta=x.get("beta"), return_state=True, **options,
        )  # fmt: skip

    @jax.jit
    def program(x, tokens, of_out, of_state):
        found, vjp = jax.vjp(lambda x: layer(x, tokens), x)
        return *found, vjp((of_out, of_state))[0]

    dtype = x["value"].dtype
    out, state, found = program(x, tokens, of_out.astype(dtype), grad_state)
    return tokens.restore(out), state, tokens.restore(found)


def worst(found, expected):
    """Return the largest error of any array, relative to its largest number."""

    def error(found, expected):
        found = np.asarray(found, np.float64)
        return np.abs(found - expected).max() / np.maximum(np.abs(expected).max(), 1e-2)

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


def of_documents(kind, length, cuts, draw):
    """Return segment ids (B, T), of which some tokens are padding."""
    if kind == "none":
        return None
    ids = np.zeros((2, length), np.int32)
    if kind == "one token each":
        ids[0] = np.arange(length)
    elif kind == "cut at every border":
        ids += np.searchsorted(cuts, np.arange(length), side="right")
        ids[0, :1] = 7
    else:
        ids += np.cumsum(draw.random((2, length)) < 0.1, axis=1)
        ids[0, 3:5], ids[1, -4:] = -1, -1
    return ids


def check(seed):
    """Draw a call, and compare all that it returns with the recurrence."""
    draw = np.random.default_rng(seed)
    kernel = KERNELS[seed % len(KERNELS)]
    schedule = ("zigzag", "contiguous")[seed // len(KERNELS) % 2]
    data = int(draw.choice([1, 2]))
    size = int(draw.integers(1, 8 // data + 1))
    length = int(draw.choice([size, 31, 64, 83]))
    layout = jaxcomm.Layout(schedule, size, length)
    kind = draw.choice(["none", "one token each", "cut at every border", "drawn"])
    held = np.sort(np.asarray(layout.all_positions()).reshape(size, -1))
    cuts = np.unique(held[:, [0, -1]]) if length > size else np.arange(length)
    ids = of_documents(kind, length, cuts, draw)
    heads = {"heads": 4, "key_heads": 2} if draw.random() < 0.3 else {}
    strength = float(draw.choice([0.01, 0.5, 20.0]))
    if kernel.name == "token_by_token":
        heads = {}
    arrays, *grads = drawn(kernel, length, strength=strength, seed=seed, **heads)
    sent = [maps.by_steps, maps.gathered][int(draw.choice([0, 1]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "least_sent", sent)
        found = run(kernel, layout, arrays, grads, ids, data)
    whole = np.zeros((2, length), int) if ids is None else ids
    repeated = dict(arrays)
    times = 4 // 2 if heads else 1
    for name in ("query", "key"):
        repeated[name] = np.repeat(arrays[name], times, axis=2)
    out, state, expected = recurrence(repeated, whole, 4**-0.5, *grads)
    for name in ("query", "key"):
        of = expected[name]
        of = of.reshape(2, length, -1, times, 4)
        expected[name] = of.sum(3)
    error = worst(found, (out, state, expected))
    # Float32 sums of 83 tokens. Small gradients of strong gates are sums of larger
    # terms.
    assert error < 2e-5, (seed, kernel, layout, kind, data, strength, sent)


@pytest.mark.parametrize(
    ("of_rows", "size", "rows"),
    [
        (True, 2, [[9, 1, 30, 1, 2], [43]]),
        (False, 4, [[40, 3, 1, 20, 1, 1, 5], [1, 30, 8, 8, 8, 8, 8]]),
        *(
            pytest.param(*some, marks=pytest.mark.thorough)
            for some in (
                (False, 8, [[1] * 64, [60, 4]]),
                (True, 8, [[1] * 64, [60, 4]]),
                (False, 3, [[50, 2, 33], [17] * 5]),
                (True, 3, [[50, 2, 33], [17] * 5]),
            )
        ),
    ],
)
def test_documents_are_dealt_anywhere(of_rows, size, rows):
    """One order of all sequences, whose documents differ, or one of each."""
    layout = document_layout(rows if of_rows else rows[0], size)
    length = layout.length
    ids = np.stack([segment_ids_of(row) for row in rows])
    ids[1, -2:] = -1
    kernel = (GatedDelta(2), Mamba2(2))[of_rows]
    arrays, *grads = drawn(kernel, length)
    found = run(kernel, layout, arrays, grads, ids, most_fragments=16)
    assert worst(found, recurrence(arrays, ids, 4**-0.5, *grads)) < 1e-5


def test_more_pieces_of_documents_than_are_sent_are_nan():
    """On the ranks that hold fewer too."""
    layout = document_layout([40, 3, 1, 20, 1, 1, 5], 4)
    ids = segment_ids_of([40, 3, 1, 20, 1, 1, 5])
    arrays, *grads = drawn(Mamba2(2), layout.length)
    found = run(Mamba2(2), layout, arrays, grads, ids, most_fragments=1)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(found[:2]))


@pytest.mark.parametrize("what", ["state_scan", "causal_halo"])
def test_tokens_out_of_place_are_refused(what):
    """By an error where something can raise, else by NaN, in gradients too."""
    layout = jaxcomm.Layout("zigzag", 2, 8)
    arrays, *_ = drawn(Mamba2(2), 8, batch=1)
    x, tokens = layout.reorder(arrays)
    wrong = dataclasses.replace(tokens, positions=np.arange(8, dtype=np.int32)[None])

    def program(backend):
        @functools.partial(
            jax.shard_map, mesh=mesh_of(2), in_specs=SPLIT, out_specs=SPLIT
        )
        def layer(x, tokens):
            if what == "causal_halo":
                return causal_halo(x["value"], "context", tokens, 2, backend=backend)
            return state_scan(
                x["query"], x["key"], x["value"], x["gate"], "context", tokens,
                kernel=Mamba2(2), backend=backend,
            )  # fmt: skip

        return jax.jit(jax.value_and_grad(lambda x, of: layer(x, of).sum()))

    message = f"(?s){what}.*rank 0 does not hold the tokens that its layout says"
    host = program("host")
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(host(x, wrong))
    assert np.isfinite(host(x, tokens)[0])
    out, grads = program("xla")(x, wrong)
    assert np.isnan(out)
    if what == "causal_halo":
        # No token is behind the last one of the sequence, and it has no gradient.
        assert np.isnan(grads["value"]).any()
    else:
        assert all(np.isnan(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "kernel",
    [GatedDelta(8), pytest.param(Mamba2(8), marks=pytest.mark.thorough)],
)
def test_errors_in_bfloat16_do_not_grow_with_the_ranks(kernel):
    """Of states that keep all they were told, as weak gates and small writes do.

    Maps that are put together in bfloat16 lose 1.7 times as much on eight ranks.
    """
    arrays, *grads = drawn(kernel, 256, batch=1, strength=0.002)
    if kernel.has_beta:
        arrays["beta"] *= 0.02
    arrays = {
        name: x if name in ("gate", "beta") else x.astype(jnp.bfloat16)
        for name, x in arrays.items()
    }
    exact = recurrence(arrays, np.zeros((1, 256), int), 4**-0.5, *grads)
    errors = []
    for size in (2, 8):
        found = run(kernel, jaxcomm.Layout("zigzag", size, 256), arrays, grads)
        error = jax.tree.map(lambda x, y: np.float64(x) - y, found, exact)
        errors.append([np.linalg.norm(of) for of in jax.tree.leaves(error)])
    for two, eight in zip(*errors, strict=True):
        assert eight <= 1.2 * two, errors


def test_gradients_of_gradients_are_those_of_the_recurrence():
    """Along a direction, against differences of gradients in float64."""
    kernel, ids = GatedDelta(4), np.repeat([0, 1], [7, 9])[None]
    arrays, *grads = drawn(kernel, 16, batch=1)
    along, _, _ = drawn(kernel, 16, batch=1, seed=1)
    layout = jaxcomm.Layout("zigzag", 2, 16)
    (x, way, of_out), tokens = layout.reorder(
        (arrays, along, grads[0]), segment_ids=ids
    )

    @functools.partial(jax.shard_map, mesh=mesh_of(2), in_specs=SPLIT, out_specs=SPLIT)
    def layer(x, tokens):
        return state_scan(
            x["query"], x["key"], x["value"], x["gate"], "context", tokens,
            kernel=kernel, beta=x["beta"],
        )  # fmt: skip

    def slope(x):
        grad = jax.grad(lambda x: (layer(x, tokens) * of_out).sum())(x)
        products = jax.tree.map(lambda a, b: (a * b).sum(), grad, way)
        return sum(jax.tree.leaves(products))

    found = tokens.restore(jax.jit(jax.grad(slope))(jax.tree.map(jnp.asarray, x)))
    step = 1e-5
    ahead, back = (
        recurrence(
            {name: np.float64(of) + by * along[name] for name, of in arrays.items()},
            ids, 4**-0.5, grads[0], np.zeros((1, 2, 4, 3)),
        )[2]
        for by in (step, -step)
    )  # fmt: skip
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, back)
    assert worst(found, expected) < 1e-4


def test_what_travels_does_not_depend_on_the_length():
    """One gather of maps each way, and the ids beside the borders of fragments.

    And whatever the dtype of the arrays, maps travel as float32.
    """

    def sent(length, dtype=np.float32):
        layout = jaxcomm.Layout("zigzag", 4, length)
        arrays, *_ = drawn(GatedDelta(4), length)
        ids = np.arange(length)[None] // 5
        arrays |= {
            name: arrays[name].astype(dtype) for name in ("query", "key", "value")
        }
        x, tokens = layout.reorder(arrays, segment_ids=ids.repeat(2, 0))

        def loss(x, tokens):
            out = jax.shard_map(
                lambda x, tokens: state_scan(
                    x["query"], x["key"], x["value"], x["gate"], "context", tokens,
                    kernel=GatedDelta(4), beta=x["beta"],
                ),
                mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT,
            )(x, tokens)  # fmt: skip
            return out.sum()

        plan = jaxcomm.plan(mesh_of(4), jax.value_and_grad(loss), x, tokens)
        return [(row.call.name, row.call.operands, row.times) for row in plan.calls]

    assert sent(32) == sent(128) == sent(32, jnp.bfloat16)


def test_programs_do_not_grow_with_the_length():
    """For GPUs XLA tunes each product of an unrolled loop by itself, for seconds."""

    def calls(length):
        layout = jaxcomm.Layout("zigzag", 2, length)
        arrays, *_ = drawn(GatedDelta(4), length)
        x, tokens = layout.reorder(arrays)

        def loss(x, tokens):
            return jax.shard_map(
                lambda x, tokens: state_scan(
                    x["query"], x["key"], x["value"], x["gate"], "context", tokens,
                    kernel=GatedDelta(4), beta=x["beta"],
                ),
                mesh=mesh_of(2), in_specs=SPLIT, out_specs=SPLIT,
            )(x, tokens).sum()  # fmt: skip

        lowered = jax.jit(jax.value_and_grad(loss)).lower(x, tokens)
        return lowered.as_text().count("call @")

    assert calls(512) == calls(8192)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_recurrence(seed):
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4, 106))
def test_equals_the_recurrence_whatever_is_drawn(seed):
    check(seed)
