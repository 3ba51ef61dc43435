"""Tokens that are not where their layout says are never attended to in silence."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
import waiting

import jaxcomm
from jaxcomm.attention import attention_fn, document_layout, relayout
from jaxcomm.attention.layout import Layout

LENGTH, SIZE = 24, 4
ZIGZAG = Layout("zigzag", SIZE, LENGTH)
PLAIN = Layout("contiguous", SIZE, LENGTH)
SPLIT = split.SPLIT
NATURAL = np.arange(LENGTH, dtype=np.int32)[None]
raises = functools.partial(pytest.raises, (jax.errors.JaxRuntimeError, ValueError))


def _x():
    rng = np.random.default_rng(0)
    return rng.standard_normal((1, LENGTH, 2, 4)).astype(np.float32)


@pytest.fixture
def attend(sharded):
    """Return a program of x and positions, split over the ranks: out and lse."""

    def program(layout, backend, **options):
        def local(x, positions, layout):
            return jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=layout, positions=positions,
                is_causal=True, backend=backend, return_residual=True, **options,
            )  # fmt: skip

        whole = sharded(local, layout.size, (SPLIT, SPLIT, jax.P()))
        return jax.jit(lambda x, positions: whole(x, positions, layout))

    return program


def _dealt(name, size=SIZE):
    return Layout(name, size, LENGTH).reorder(_x())


# What a user may do to the batch, by the layout of the call, and the first token that
# is then out of place: its rank, its index there, its position, and what the layout
# says.
MISTAKES = [
    (
        ZIGZAG,
        [
            # The reorder was forgotten; of another schedule; of another ring size.
            ((_x(), NATURAL), (0, 3, 3, 21)),
            (_dealt("striped"), (0, 1, 4, 1)),
            (_dealt("zigzag", 2), (0, 3, 3, 21)),
        ],
    ),
    (Layout("striped", SIZE, LENGTH), [(_dealt("zigzag"), (0, 1, 1, 4))]),
    (Layout("contiguous", SIZE, LENGTH), [(_dealt("zigzag"), (0, 3, 21, 3))]),
    (
        document_layout([10, 14], SIZE),
        [(document_layout([5, 19], SIZE).reorder(_x()), None)],
    ),
    # A length that is not the data's.
    (Layout("zigzag", SIZE, LENGTH - 1), [(_dealt("zigzag"), (0, 5, 23, -1))]),
]


@pytest.mark.parametrize(("layout", "mistakes"), MISTAKES)
def test_the_host_backend_raises_and_says_which_token(attend, layout, mistakes):
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
    x = _x()[:, : layout.length]
    dealt, positions = layout.reorder(x)
    found = layout.restore(program(dealt, positions)[0], positions)
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("place", "strategy"), [(0, "ring"), (0, "all_gather"), (3, "ring")]
)
def test_where_nothing_can_raise_all_is_nan(attend, place, strategy):
    layout, mistakes = MISTAKES[place]
    program = attend(layout, "xla", strategy=strategy)

    @jax.jit
    def results(x, positions):
        (out, lse), transpose = jax.vjp(lambda x: program(x, positions), x)
        return out, lse, *transpose((jnp.ones_like(out), jnp.ones_like(lse)))

    for batch, _ in mistakes:
        assert all(jnp.isnan(x).all() for x in results(*batch))
    assert all(jnp.isfinite(x).all() for x in results(*layout.reorder(_x())))


def test_one_misplaced_rank_spoils_what_sees_its_keys_and_nothing_else(attend):
    """Striped and zigzag agree on the middle rank of three."""
    striped, zigzag = (Layout(name, 3, 6) for name in ("striped", "zigzag"))
    assert striped.positions_of(1).tolist() == zigzag.positions_of(1).tolist()
    out, _ = attend(zigzag, "xla")(*striped.reorder(_x()[:, :6]))
    assert jnp.isnan(out).all()


@pytest.mark.parametrize("backend", ["xla", "host"])
def test_one_wrong_token_in_one_row_is_enough(attend, backend):
    x, positions = ZIGZAG.reorder(np.concatenate([_x()] * 2))
    positions = positions.copy()
    positions[1, 7] += 1
    program = attend(ZIGZAG, backend)
    if backend == "host":
        with raises(match="rank 1 do"):
            jax.block_until_ready(program(x, positions))
    else:
        out, _ = program(x, positions)
        assert jnp.isnan(out[:, 6:12]).all()


def test_forgotten_positions_are_refused_when_traced(sharded):
    """With what to do; others that are refused are in ``test_supported.py``."""
    layout = document_layout([10, 14], SIZE)
    text = re.escape("batch, positions = layout.reorder(batch)")
    with pytest.raises(TypeError, match=f"ring_attention: positions= is miss.*{text}"):
        jax.eval_shape(
            sharded(lambda x: attention_fn("context", layout)(x, x, x)), _x()
        )
    with pytest.raises(TypeError, match="relayout: positions= is missing"):
        jax.eval_shape(sharded(lambda x: relayout(x, layout, PLAIN, "context")), _x())


@pytest.mark.parametrize("backend", ["xla", "host"])
def test_relayout_of_tokens_out_of_place_is_no_number(sharded, backend):
    def local(x, positions):
        tree = {"x": x, "ids": positions}
        return relayout(
            tree, ZIGZAG, PLAIN, "context", positions=positions, backend=backend
        )

    whole = jax.jit(sharded(local))
    if backend == "xla":
        found = whole(_x(), NATURAL)
        assert jnp.isnan(found["x"]).all()
        assert (found["ids"] == jnp.iinfo(jnp.int32).min).all()
    else:
        with raises(match=r"relayout.*rank 0 does not"):
            jax.block_until_ready(whole(_x(), NATURAL))


def test_restore_goes_by_positions_and_refuses_those_of_another_sequence():
    shorter = Layout("zigzag", SIZE, LENGTH - 1)
    x, positions = ZIGZAG.reorder(_x())
    for layout in (ZIGZAG, PLAIN, Layout("zigzag", 2, LENGTH)):
        np.testing.assert_array_equal(layout.restore(x, positions), _x())
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
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        timeout=waiting.HANG_SECONDS,
        env=dict(os.environ, JAXCOMM_CHECK="1"), check=False,
    )  # fmt: skip
    expected = (
        "rank 1 does not hold the tokens that its layout says: token 2 has position 2"
    )
    assert expected in ran.stdout, ran.stderr


def test_checks_are_neither_callbacks_nor_there_without_positions(attend, sharded):
    """A callback would keep programs out of JAX's persistent compilation cache."""
    for backend in ("host", "xla"):
        program = jax.make_jaxpr(attend(ZIGZAG, backend))(*ZIGZAG.reorder(_x()))
        assert "callback" not in str(program)

    def checks(**options):
        ring = functools.partial(jaxcomm.ring_attention, axis_name="context")
        whole = sharded(lambda x: ring(x, x, x, layout=PLAIN, **options))
        return str(jax.make_jaxpr(whole)(_x())).count("check_positions[")

    assert checks() == 0
    # Positions may be of one sequence.
    assert checks(positions=jnp.arange(6)) == 1


def test_a_layer_under_vmap_is_checked_row_by_row(sharded):
    @jax.vmap
    def one(x, positions):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=ZIGZAG, positions=positions
        )

    whole = jax.jit(sharded(one))
    x, positions = ZIGZAG.reorder(np.concatenate([_x()] * 2))
    assert jnp.isfinite(whole(x, positions)).all()
    positions = positions.copy()
    positions[1, 0] = 9
    with raises(match="token 0 has position 9"):
        jax.block_until_ready(whole(x, positions))
