"""Tokens that are not where their layout says are never attended to in silence."""

import dataclasses
import functools
import os
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import sharded

import jaxcomm
from jaxcomm.attention import Ranges, document_layout, relayout
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.strategies.ulysses import Ulysses

LENGTH, SIZE = 24, 4
ZIGZAG, STRIPED, PLAIN = (
    Layout(name, SIZE, LENGTH) for name in ("zigzag", "striped", "contiguous")
)
X = np.random.default_rng(0).standard_normal((1, LENGTH, 2, 4)).astype(np.float32)
NATURAL = np.arange(LENGTH, dtype=np.int32)[None]
raises = functools.partial(pytest.raises, (jax.errors.JaxRuntimeError, ValueError))


def attend(backend, size=SIZE, **options):
    def local(x, tokens):
        return jaxcomm.ring_attention(
            x, x, x, "context", tokens, is_causal=True, backend=backend,
            return_residual=True, **options,
        )  # fmt: skip

    return jax.jit(sharded(local, size))


def positions_of(layout, rows=1):
    return layout.reorder(np.zeros((rows, layout.length)))[1].positions


def wrong(layout, positions):
    """Return a batch whose positions are others than its layout says."""
    tokens = layout.reorder(X[:, : layout.length])[1]
    x = np.repeat(X[:, : positions.shape[1]], len(positions), 0)
    return x, dataclasses.replace(tokens, positions=positions)


def one_wrong_token():
    """Return two rows, of which the second has a wrong token on rank 1."""
    positions = positions_of(ZIGZAG, 2).copy()
    positions[1, 7] += 1
    return wrong(ZIGZAG, positions)


DOCUMENTS, OTHERS = (document_layout(of, SIZE) for of in ([10, 14], [5, 19]))
# By the layout of the tokens: batches, and the first token of each that is then out of
# place: its rank, its index there, its position, and what the layout says.
MISTAKES = [
    (
        ZIGZAG,
        [
            (wrong(ZIGZAG, NATURAL), (0, 3, 3, 21)),
            (wrong(ZIGZAG, positions_of(STRIPED)), (0, 1, 4, 1)),
            (wrong(ZIGZAG, positions_of(Layout("zigzag", 2, LENGTH))), (0, 3, 3, 21)),
        ],
    ),
    (PLAIN, [(wrong(PLAIN, positions_of(ZIGZAG)), (0, 3, 21, 3))]),
    (ZIGZAG, [(one_wrong_token(), (1, 1, 5, 4))]),
    # Rows of other documents, where the layout is of one order for all.
    (
        DOCUMENTS,
        [
            (wrong(DOCUMENTS, np.concatenate([*map(positions_of, pair)])), None)
            for pair in ((DOCUMENTS, OTHERS), (OTHERS, DOCUMENTS))
        ],
    ),
    # A length that is not the data's.
    (
        Layout("zigzag", SIZE, LENGTH - 1),
        [(wrong(Layout("zigzag", SIZE, LENGTH - 1), positions_of(ZIGZAG)),
          (0, 5, 23, -1))],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "mistakes"), MISTAKES)
def test_the_host_backend_raises_and_says_which_token(layout, mistakes):
    program = attend("host")
    for batch, first in mistakes:
        with raises() as caught:
            jax.block_until_ready(program(*batch))
        text = str(caught.value)
        assert "Pass the tokens that came with this batch" in text
        assert "ring_attention" in text
        if first is not None:
            rank, token, found, expected = first
            assert (
                f"rank {rank} does not hold the tokens that its layout says: token "
                f"{token} has position {found}, and the layout says {expected}"
            ) in text
    # The communicator serves the next program.
    x = X[:, : layout.length]
    dealt, tokens = layout.reorder(x)
    found = tokens.restore(program(dealt, tokens)[0])
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_where_nothing_can_raise_all_is_nan():
    layout, mistakes = MISTAKES[0]
    program = attend("xla")

    @jax.jit
    def results(x, tokens):
        (out, lse), transpose = jax.vjp(lambda x: program(x, tokens), x)
        return out, lse, *transpose((jnp.ones_like(out), jnp.ones_like(lse)))

    for batch, _ in mistakes:
        assert all(jnp.isnan(x).all() for x in results(*batch))
    assert all(jnp.isfinite(x).all() for x in results(*layout.reorder(X)))


HIDDEN = np.ones((1, 2, LENGTH, LENGTH), bool)
HIDDEN[:, :, 12:18, 12:18] = False  # All that rank 2 has from itself.
PADDED = np.where(np.arange(LENGTH) // 6 == 2, -1, 0).astype(np.int32)[None]
# What may keep a query from its own key, or all from a value. The second has all that
# may not, as well.
HIDING: dict[str, dict] = {
    "mask": {"mask": HIDDEN},
    "ranges": {"mask": Ranges(keys=(0 * NATURAL, NATURAL // 6 * 6))},
    "documents": {
        "local_window_size": 0,
        "logits_soft_cap": 1e-3,
        "alibi_slopes": np.array([1e3, -np.inf], np.float32),
        "sinks": np.array([1e6, -np.inf], np.float32),
    },
    "dropout": {
        "local_window_size": 0,
        "dropout": (0.9, np.zeros(2, np.uint32)),
    },
}


@pytest.mark.parametrize(
    ("hiding", "strategy"),
    [
        ("mask", "ring"),
        ("ranges", "ring"),
        ("dropout", "all_gather"),
        *(("documents", x) for x in ("ring", "all_gather", "halo", Ulysses(2))),
    ],
    ids=str,
)
def test_no_option_hides_that_tokens_are_out_of_place(hiding, strategy):
    options = dict(HIDING[hiding])
    mask, split = options.pop("mask", None), jax.P(None, "context")

    def local(x, tokens, mask):
        return jaxcomm.ring_attention(
            *x, "context", tokens, mask=mask, backend="xla", strategy=strategy,
            return_residual=True, **options,
        )  # fmt: skip

    specs = split, split, split if hiding == "ranges" else jax.P(None, None, "context")
    program = sharded(local, SIZE, specs, split)
    ids = PADDED if hiding == "documents" else None
    x, tokens = PLAIN.reorder([X] * 3, segment_ids=ids)
    positions = NATURAL.copy()
    positions[0, [12, 13]] = 13, 12

    @jax.jit
    def results(x, positions):
        of = dataclasses.replace(tokens, positions=positions)
        (out, lse), transpose = jax.vjp(lambda x: program(x, of, mask), x)
        return out, lse, *transpose((jnp.ones_like(out), jnp.ones_like(lse)))[0]

    for found in results(x, positions):
        assert jnp.isnan(found[:, 12:18]).all()
    assert not any(jnp.isnan(found[..., 0]).all() for found in results(x, NATURAL))


def test_one_misplaced_rank_or_token_spoils_what_sees_its_keys():
    """Striped and zigzag agree on the middle rank of three."""
    striped, zigzag = (Layout(name, 3, 6) for name in ("striped", "zigzag"))
    assert striped.positions_of(1).tolist() == zigzag.positions_of(1).tolist()
    out, _ = attend("xla", 3)(*wrong(zigzag, positions_of(striped)))
    assert jnp.isnan(out).all()
    out, _ = attend("xla")(*one_wrong_token())
    assert jnp.isnan(out[:, 6:12]).all()


def test_ranks_in_another_order_than_the_tokens_are_noticed():
    mesh = jax.make_mesh((2, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)

    def local(x, tokens):
        return jaxcomm.ring_attention(x, x, x, ("b", "a"), tokens)

    spec = jax.P(None, ("a", "b"))
    whole = jax.jit(sharded(local, None, spec, spec, mesh))
    with raises(match="rank 1 does not hold"):
        jax.block_until_ready(whole(*ZIGZAG.reorder(X)))


def test_relayout_of_tokens_out_of_place_is_no_number():
    def program(backend):
        def local(x, tokens):
            tree = {"x": x, "ids": tokens.positions}
            return relayout(tree, tokens, PLAIN, "context", backend=backend)

        return jax.jit(sharded(local))

    x, tokens = wrong(ZIGZAG, NATURAL)
    found = program("xla")(x, tokens)
    assert jnp.isnan(found["x"]).all()
    # Not zeros, with which a model would train on.
    slopes = jax.grad(lambda x: program("xla")(x, tokens)["x"].sum())(x)
    assert jnp.isnan(slopes).all()
    assert (found["ids"] == jnp.iinfo(jnp.int32).min).all()
    few = program("xla")(jnp.ones((1, LENGTH), jnp.float4_e2m1fn), tokens)["x"]
    assert (few.astype(jnp.float32) == -6).all()  # It has no NaN.
    with raises(match=r"relayout.*rank 0 does not"):
        jax.block_until_ready(program("host")(x, tokens))
    # What is in place is not touched: a complex product would make NaN of it.
    x = np.full((1, LENGTH), complex(np.inf, 1), np.complex64)
    found = program("xla")(*ZIGZAG.reorder(x))["x"]
    np.testing.assert_array_equal(found, x)


def test_restore_goes_by_positions_and_refuses_those_of_another_sequence():
    shorter = Layout("zigzag", SIZE, LENGTH - 1)
    x, tokens = ZIGZAG.reorder(X)
    for layout in (PLAIN, Layout("zigzag", 2, LENGTH)):
        np.testing.assert_array_equal(Tokens(layout, tokens.positions).restore(x), X)
    twice = tokens.positions.copy()
    twice[0, 1] = twice[0, 0]
    tree = {"x": x, "ids": np.ones(twice.shape, np.uint8), "is": tokens.positions > 0}
    for held in (Tokens(shorter, tokens.positions), Tokens(ZIGZAG, twice)):
        with pytest.raises(ValueError, match=r"not those of a sequence of 2\d tokens"):
            held.restore(x)
        found = jax.jit(Tokens.restore)(held, tree)
        assert jnp.isnan(found["x"]).all()
        assert (found["ids"] == 255).all()
        assert found["is"].all()
    rows = np.concatenate([tokens.positions, tokens.positions[:, ::-1]])
    with pytest.raises(ValueError, match="and the same in all rows"):
        Tokens(ZIGZAG, rows).restore(np.concatenate([x, x]))


def test_with_jaxcomm_check_a_callback_raises_on_any_backend():
    """In a process of its own, at whose end JAX raises once more."""
    program = """
import jax, numpy as np, jaxcomm

layout = jaxcomm.Layout("zigzag", 2, 8)
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("context",), auto, devices=jax.devices()[:2])
split = jax.P(None, "context")

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=split, out_specs=split)
def attend(x, tokens):
    def ring(x, tokens):
        return jaxcomm.ring_attention(x, x, x, "context", tokens, backend="xla")

    return ring(x, tokens) + jax.vmap(ring)(x, tokens)

x, tokens = layout.reorder(np.ones((1, 8, 2, 4), np.float32))
assert np.isfinite(attend(x, tokens)).all()
try:
    tokens.positions[0, 6] = 2  # of rank 1 alone
    jax.block_until_ready(attend(x, tokens))
    jax.effects_barrier()
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
    ran = forked.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env=dict(os.environ, JAXCOMM_CHECK="1"),
    )  # fmt: skip
    expected = (
        "rank 1 does not hold the tokens that its layout says: token 2 has position 2"
    )
    assert expected in ran.stdout, ran.stderr


def test_checks_are_neither_callbacks_nor_there_without_positions():
    """A callback would keep programs out of JAX's persistent compilation cache."""
    for backend in ("host", "xla"):
        program = jax.make_jaxpr(attend(backend))(*ZIGZAG.reorder(X))
        assert "callback" not in str(program)

    def checks(tokens):
        ring = functools.partial(jaxcomm.ring_attention, axis_name="context")
        whole = sharded(lambda x: ring(x, x, x, tokens=tokens))
        return str(jax.make_jaxpr(whole)(X)).count("check_positions[")

    assert checks(PLAIN) == 0
    # Positions may be of one sequence.
    assert checks(Tokens(PLAIN, jnp.arange(6))) == 1


def test_a_layer_under_vmap_is_checked_row_by_row():
    @jax.vmap
    def one(x, tokens):
        return jaxcomm.ring_attention(x, x, x, "context", tokens)

    whole = jax.jit(sharded(one))
    assert jnp.isfinite(whole(*ZIGZAG.reorder(np.concatenate([X, X])))).all()
    with raises(match="token 1 has position 5"):
        jax.block_until_ready(whole(*one_wrong_token()))


def test_relayout_refuses_positions_of_another_shape():
    for count in (LENGTH - SIZE, SIZE):
        tokens = jaxcomm.Tokens(ZIGZAG, np.zeros((1, count), np.int32))
        move = sharded(lambda x, tokens: relayout(x, tokens, PLAIN, "context"))
        with pytest.raises(ValueError, match=r"source\.positions has shape"):
            jax.eval_shape(move, X, tokens)
