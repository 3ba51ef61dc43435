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

import jaxcomm
from jaxcomm.attention import attention_fn, document_layout, relayout
from jaxcomm.attention.layout import Layout

LENGTH, SIZE = 24, 4
ZIGZAG = Layout("zigzag", SIZE, LENGTH)
SPLIT = jax.P(None, "context")
NATURAL = np.arange(LENGTH, dtype=np.int32)[None]


def _x(heads=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, LENGTH, heads, 4)).astype(np.float32)


def _attend(layout, backend, **options):
    """Return a program of x and positions, split over four ranks: out and lse."""

    def local(x, positions, layout):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=positions,
            is_causal=True, backend=backend, return_residual=True, **options,
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=split.ring_over(SIZE), in_specs=(SPLIT, SPLIT, jax.P()),
        out_specs=SPLIT,
    )  # fmt: skip
    return jax.jit(lambda x, positions: whole(x, positions, layout))


# What a user may do to the batch, and the first token that is then out of place: its
# rank, its index there, its position, and what the layout says.
MISTAKES = {
    "reorder was forgotten": (
        ZIGZAG,
        lambda x: (x, NATURAL),
        (0, 3, 3, 21),
    ),
    "striped data for a zigzag call": (
        ZIGZAG,
        lambda x: Layout("striped", SIZE, LENGTH).reorder(x),
        (0, 1, 4, 1),
    ),
    "zigzag data for a striped call": (
        Layout("striped", SIZE, LENGTH),
        ZIGZAG.reorder,
        (0, 1, 1, 4),
    ),
    "data reordered for another ring size": (
        ZIGZAG,
        lambda x: Layout("zigzag", 2, LENGTH).reorder(x),
        (0, 3, 3, 21),
    ),
    "zigzag data for a contiguous call": (
        Layout("contiguous", SIZE, LENGTH),
        ZIGZAG.reorder,
        (0, 3, 21, 3),
    ),
    "data of other documents": (
        document_layout([10, 14], SIZE),
        lambda x: document_layout([5, 19], SIZE).reorder(x),
        None,
    ),
    "a length that is not the data's": (
        Layout("zigzag", SIZE, LENGTH - 1),
        ZIGZAG.reorder,
        (0, 5, 23, -1),
    ),
}
every_mistake = pytest.mark.parametrize("mistake", MISTAKES)


@every_mistake
def test_the_host_backend_raises_and_says_which_token(mistake):
    layout, deal, first = MISTAKES[mistake]
    program = _attend(layout, "host")
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(program(*deal(_x())))
    text = str(caught.value)
    assert "Reorder the batch with the layout that is passed" in text
    assert "ring_attention" in text
    if first is not None:
        rank, token, found, expected = first
        assert (
            f"rank {rank} does not hold the tokens that its layout says: token {token} "
            f"has position {found}, and the layout says {expected}"
        ) in text
    # The communicator serves the next program.
    out, _ = program(*layout.reorder(_x()[:, : layout.length]))
    assert jnp.isfinite(out).all() or layout.length < LENGTH


@pytest.mark.parametrize(
    ("mistake", "strategy"),
    [
        *((mistake, "ring") for mistake in MISTAKES),
        (next(iter(MISTAKES)), "all_gather"),
    ],
)
def test_where_nothing_can_raise_all_is_nan(mistake, strategy):
    layout, deal, _ = MISTAKES[mistake]
    program = _attend(layout, "xla", strategy=strategy)
    x, positions = deal(_x())
    (out, lse), transpose = jax.vjp(lambda x: program(x, positions), jnp.asarray(x))
    assert jnp.isnan(out).all()
    assert jnp.isnan(lse).all()
    (grad,) = transpose((jnp.ones_like(out), jnp.ones_like(lse)))
    assert jnp.isnan(grad).all()


@pytest.mark.parametrize(
    "layout", [ZIGZAG, Layout("striped", SIZE, 23), document_layout([10, 14], SIZE)]
)
@pytest.mark.parametrize("backend", ["host", "xla"])
def test_tokens_in_place_are_attended_to_as_ever(layout, backend):
    x = _x()[:, : layout.length]
    dealt, positions = layout.reorder(x)
    program = _attend(layout, backend)
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    restored = layout.restore(program(dealt, positions)[0], positions)
    np.testing.assert_allclose(restored, expected, atol=1e-5)


def test_one_misplaced_rank_spoils_what_sees_its_keys_and_nothing_else():
    """Striped and zigzag agree on the middle rank of three."""
    length = 6
    striped, zigzag = (Layout(name, 3, length) for name in ("striped", "zigzag"))
    assert striped.positions_of(1).tolist() == zigzag.positions_of(1).tolist()

    def local(x, positions):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=zigzag, positions=positions,
            is_causal=True, backend="xla",
        )  # fmt: skip

    whole = jax.shard_map(
        local, mesh=split.ring_over(3), in_specs=SPLIT, out_specs=SPLIT
    )
    out = jax.jit(whole)(*striped.reorder(_x()[:, :length]))
    assert jnp.isnan(out).all()


@pytest.mark.parametrize("backend", ["xla", "host"])
def test_one_wrong_token_in_one_row_is_enough(backend):
    x, positions = ZIGZAG.reorder(np.concatenate([_x()] * 2))
    positions = positions.copy()
    positions[1, 7] += 1
    program = _attend(ZIGZAG, backend)
    if backend == "host":
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="rank 1 do"):
            jax.block_until_ready(program(x, positions))
    else:
        out, _ = program(x, positions)
        assert jnp.isnan(out[:, 6:12]).all()


def test_positions_may_be_of_one_sequence():
    x, positions = ZIGZAG.reorder(_x())

    def local(x, positions):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=ZIGZAG, positions=positions
        )

    whole = jax.shard_map(
        local, mesh=split.ring_over(SIZE), in_specs=(SPLIT, jax.P("context")),
        out_specs=SPLIT,
    )  # fmt: skip
    assert jnp.isfinite(jax.jit(whole)(x, positions[0])).all()


def _trace(function):
    """Trace a function of x over four ranks."""
    whole = jax.shard_map(
        function, mesh=split.ring_over(SIZE), in_specs=SPLIT, out_specs=SPLIT
    )
    return jax.eval_shape(whole, _x())


@pytest.mark.parametrize("layout", [ZIGZAG, document_layout([10, 14], SIZE)])
def test_forgotten_positions_are_refused_when_traced(layout):
    def attend(x, **options):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, **options
        )

    text = re.escape("batch, positions = layout.reorder(batch)")
    with pytest.raises(
        TypeError, match=f"ring_attention: positions= is missing.*{text}"
    ):
        _trace(attend)
    plain = Layout("contiguous", SIZE, LENGTH)
    with pytest.raises(TypeError, match="relayout: positions= is missing"):
        _trace(lambda x: relayout(x, layout, plain, "context"))
    with pytest.raises(TypeError, match="ring_attention: positions= is missing"):
        _trace(lambda x: attention_fn("context", layout)(x, x, x))
    with pytest.raises(TypeError, match="ring_attention: key_positions= is missing"):
        _trace(
            lambda x: jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=plain, key_layout=layout
            )
        )


@pytest.mark.parametrize(
    ("positions", "error", "text"),
    [
        (jnp.zeros((1, 6)), TypeError, "positions has dtype float32. Pass those that"),
        (
            jnp.zeros((1, 5), int),
            ValueError,
            "positions has shape (1, 5) on this rank,",
        ),
        (
            jnp.zeros((), int),
            ValueError,
            "positions has shape () on this rank, and (6,)",
        ),
    ],
)
def test_positions_of_another_form_are_refused(positions, error, text):
    with pytest.raises(error, match=re.escape(text)):
        _trace(
            lambda x: jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=ZIGZAG, positions=positions
            )
        )


def test_positions_of_keys_need_a_layout_of_keys():
    attend = functools.partial(
        jaxcomm.ring_attention,
        axis_name="context",
        layout=Layout("contiguous", SIZE, LENGTH),
        key_positions=jnp.arange(6),
    )
    with pytest.raises(ValueError, match="key_positions= was given without key_layout"):
        _trace(lambda x: attend(x, x, x))


@pytest.mark.parametrize("backend", ["xla", "host"])
def test_relayout_of_tokens_out_of_place_is_no_number(backend):
    plain = Layout("contiguous", SIZE, LENGTH)

    def local(x, positions):
        tree = {"x": x, "ids": positions}
        return relayout(
            tree, ZIGZAG, plain, "context", positions=positions, backend=backend
        )

    whole = jax.shard_map(
        local, mesh=split.ring_over(SIZE), in_specs=SPLIT, out_specs=SPLIT
    )
    if backend == "xla":
        found = jax.jit(whole)(_x(), NATURAL)
        assert jnp.isnan(found["x"]).all()
        assert (found["ids"] == jnp.iinfo(jnp.int32).min).all()
    else:
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match=r"relayout.*rank 0 does not"
        ):
            jax.block_until_ready(jax.jit(whole)(_x(), NATURAL))


def test_restore_by_another_layout_is_right():
    x, positions = ZIGZAG.reorder(_x())
    for layout in (
        ZIGZAG,
        Layout("striped", SIZE, LENGTH),
        Layout("zigzag", 2, LENGTH),
    ):
        np.testing.assert_array_equal(layout.restore(x, positions), _x())
    with pytest.raises(TypeError, match=r"Layout\.restore: positions= is missing"):
        ZIGZAG.restore(x)


def test_restore_refuses_positions_of_another_sequence():
    shorter = Layout("zigzag", SIZE, LENGTH - 1)
    x, positions = ZIGZAG.reorder(_x())
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
    with pytest.raises(TypeError, match="positions have dtype float32"):
        ZIGZAG.restore(x, positions.astype(np.float32))


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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100,
        env=dict(os.environ, JAXCOMM_CHECK="1"), check=False,
    )  # fmt: skip
    expected = (
        "rank 1 does not hold the tokens that its layout says: token 2 has position 2"
    )
    assert expected in ran.stdout, ran.stderr


def test_without_jaxcomm_check_there_is_no_callback():
    """A callback would keep programs out of JAX's persistent compilation cache."""
    for backend in ("host", "xla"):
        program = _attend(ZIGZAG, backend)
        assert "callback" not in str(jax.make_jaxpr(program)(*ZIGZAG.reorder(_x())))


def test_the_natural_order_is_not_checked_unless_positions_are_given():
    layout = Layout("contiguous", SIZE, LENGTH)

    def count(**options):
        def local(x):
            return jaxcomm.ring_attention(
                x, x, x, axis_name="context", layout=layout, **options
            )

        whole = jax.shard_map(
            local, mesh=split.ring_over(SIZE), in_specs=SPLIT, out_specs=SPLIT
        )
        return str(jax.make_jaxpr(whole)(_x())).count("check_positions[")

    assert count() == 0
    assert count(positions=jnp.arange(6)) == 1


def test_a_layer_under_vmap_is_checked_row_by_row():
    @functools.partial(jax.vmap, in_axes=(0, 0))
    def one(x, positions):
        return jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=ZIGZAG, positions=positions
        )

    whole = jax.jit(
        jax.shard_map(one, mesh=split.ring_over(SIZE), in_specs=SPLIT, out_specs=SPLIT)
    )
    x, positions = ZIGZAG.reorder(np.concatenate([_x()] * 2))
    assert jnp.isfinite(whole(x, positions)).all()
    positions = positions.copy()
    positions[1, 0] = 9
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="token 0 has position 9"
    ):
        jax.block_until_ready(whole(x, positions))
