"""Tokens that are not where their layout says are never attended to in silence."""

import functools
import os
import re
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import SPLIT, sharded

import jaxcomm
from jaxcomm.attention import attention_fn, document_layout, relayout
from jaxcomm.attention.layout import Layout

LENGTH, SIZE = 24, 4
ZIGZAG, STRIPED, PLAIN = (
    Layout(name, SIZE, LENGTH) for name in ("zigzag", "striped", "contiguous")
)
X = np.random.default_rng(0).standard_normal((1, LENGTH, 2, 4)).astype(np.float32)
TWO = np.concatenate([X, X])
NATURAL = np.arange(LENGTH, dtype=np.int32)[None]
raises = functools.partial(pytest.raises, (jax.errors.JaxRuntimeError, ValueError))


def attend(layout, backend, **options):
    """Return a program of x and positions, split over the ranks: out and lse."""

    def local(x, positions, layout):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=positions,
            is_causal=True, backend=backend, return_residual=True, **options,
        )  # fmt: skip

    whole = sharded(local, layout.size, (SPLIT, SPLIT, jax.P()))
    return jax.jit(lambda x, positions: whole(x, positions, layout))


def one_wrong_token():
    """Return two rows, of which the second has a wrong token on rank 1."""
    x, positions = ZIGZAG.reorder(TWO)
    positions = positions.copy()
    positions[1, 7] += 1
    return x, positions


# What a user may do to the batch, by the layout of the call, and the first token that
# is then out of place: its rank, its index there, its position, and what the layout
# says.
MISTAKES = [
    (
        ZIGZAG,
        [
            # The reorder was forgotten; of another schedule; of another ring size.
            ((X, NATURAL), (0, 3, 3, 21)),
            (STRIPED.reorder(X), (0, 1, 4, 1)),
            (Layout("zigzag", 2, LENGTH).reorder(X), (0, 3, 3, 21)),
        ],
    ),
    (PLAIN, [(ZIGZAG.reorder(X), (0, 3, 21, 3))]),
    (
        document_layout([10, 14], SIZE),
        [(document_layout([5, 19], SIZE).reorder(X), None)],
    ),
    (ZIGZAG, [(one_wrong_token(), (1, 1, 5, 4))]),
    # A length that is not the data's.
    (Layout("zigzag", SIZE, LENGTH - 1), [(ZIGZAG.reorder(X), (0, 5, 23, -1))]),
]


@pytest.mark.parametrize(("layout", "mistakes"), MISTAKES)
def test_the_host_backend_raises_and_says_which_token(layout, mistakes):
    program = attend(layout, "host")
    for batch, first in mistakes:
        with raises() as caught:
            jax.block_until_ready(program(*batch))
        text = str(caught.value)
        assert "Reorder the batch with the layout that is passed" in text
        assert "ring_attention" in text
        if first is not None:
            rank, token, found, expected = first
            assert (
                f"rank {rank} does not hold the tokens that its layout says: token "
                f"{token} has position {found}, and the layout says {expected}"
            ) in text
    # The communicator serves the next program.
    x = X[:, : layout.length]
    dealt, positions = layout.reorder(x)
    found = layout.restore(program(dealt, positions)[0], positions)
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("place", "strategy"), [(0, "ring"), (0, "all_gather"), (2, "ring")]
)
def test_where_nothing_can_raise_all_is_nan(place, strategy):
    layout, mistakes = MISTAKES[place]
    program = attend(layout, "xla", strategy=strategy)

    @jax.jit
    def results(x, positions):
        (out, lse), transpose = jax.vjp(lambda x: program(x, positions), x)
        return out, lse, *transpose((jnp.ones_like(out), jnp.ones_like(lse)))

    for batch, _ in mistakes:
        assert all(jnp.isnan(x).all() for x in results(*batch))
    assert all(jnp.isfinite(x).all() for x in results(*layout.reorder(X)))


def test_one_misplaced_rank_or_token_spoils_what_sees_its_keys():
    """Striped and zigzag agree on the middle rank of three."""
    striped, zigzag = (Layout(name, 3, 6) for name in ("striped", "zigzag"))
    assert striped.positions_of(1).tolist() == zigzag.positions_of(1).tolist()
    out, _ = attend(zigzag, "xla")(*striped.reorder(X[:, :6]))
    assert jnp.isnan(out).all()
    out, _ = attend(ZIGZAG, "xla")(*one_wrong_token())
    assert jnp.isnan(out[:, 6:12]).all()


def test_forgotten_positions_are_refused_when_traced():
    """With what to do; others that are refused are in ``test_supported.py``."""
    layout = document_layout([10, 14], SIZE)
    text = re.escape("batch, positions = layout.reorder(batch)")
    with pytest.raises(TypeError, match=f"ring_attention: positions= is miss.*{text}"):
        jax.eval_shape(sharded(lambda x: attention_fn("context", layout)(x, x, x)), X)
    with pytest.raises(TypeError, match="relayout: positions= is missing"):
        jax.eval_shape(sharded(lambda x: relayout(x, layout, PLAIN, "context")), X)


def test_relayout_of_tokens_out_of_place_is_no_number():
    def program(backend):
        def local(x, positions):
            tree = {"x": x, "ids": positions}
            options = {"positions": positions, "backend": backend}
            return relayout(tree, ZIGZAG, PLAIN, "context", **options)

        return jax.jit(sharded(local))(X, NATURAL)

    found = program("xla")
    assert jnp.isnan(found["x"]).all()
    assert (found["ids"] == jnp.iinfo(jnp.int32).min).all()
    with raises(match=r"relayout.*rank 0 does not"):
        jax.block_until_ready(program("host"))


def test_restore_goes_by_positions_and_refuses_those_of_another_sequence():
    shorter = Layout("zigzag", SIZE, LENGTH - 1)
    x, positions = ZIGZAG.reorder(X)
    for layout in (ZIGZAG, PLAIN, Layout("zigzag", 2, LENGTH)):
        np.testing.assert_array_equal(layout.restore(x, positions), X)
    with pytest.raises(ValueError, match="not those of a sequence of 23 tokens, each"):
        shorter.restore(x, positions)
    twice = positions.copy()
    twice[0, 1] = twice[0, 0]
    tree = {"x": x, "ids": np.ones(positions.shape, np.uint8), "is": positions > 0}
    for layout, held in ((shorter, positions), (ZIGZAG, twice)):
        found = jax.jit(layout.restore)(tree, held)
        assert jnp.isnan(found["x"]).all()
        assert (found["ids"] == 255).all()
        assert found["is"].all()
    rows = np.concatenate([positions, positions[:, ::-1]])
    with pytest.raises(ValueError, match="and the same in all rows"):
        ZIGZAG.restore(np.concatenate([x, x]), rows)


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
def attend(x, positions):
    return jaxcomm.ring_attention(
        x, x, x, axis_name="context", layout=layout, positions=positions, backend="xla")

x, positions = layout.reorder(np.ones((1, 8, 2, 4), np.float32))
assert np.isfinite(attend(x, positions)).all()
try:
    positions[0, 6] = 2  # of rank 1 alone
    jax.block_until_ready(attend(x, positions))
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
        program = jax.make_jaxpr(attend(ZIGZAG, backend))(*ZIGZAG.reorder(X))
        assert "callback" not in str(program)

    def checks(**options):
        ring = functools.partial(jaxcomm.ring_attention, axis_name="context")
        whole = sharded(lambda x: ring(x, x, x, layout=PLAIN, **options))
        return str(jax.make_jaxpr(whole)(X)).count("check_positions[")

    assert checks() == 0
    # Positions may be of one sequence.
    assert checks(positions=jnp.arange(6)) == 1


def test_a_layer_under_vmap_is_checked_row_by_row():
    @jax.vmap
    def one(x, positions):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=ZIGZAG, positions=positions
        )

    whole = jax.jit(sharded(one))
    assert jnp.isfinite(whole(*ZIGZAG.reorder(TWO))).all()
    with raises(match="token 1 has position 5"):
        jax.block_until_ready(whole(*one_wrong_token()))
