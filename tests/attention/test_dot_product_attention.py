"""The twin of jax.nn.dot_product_attention for plain jit, in natural order."""

import collections
import dataclasses
import functools
import re

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import Ranges

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
NAMES = "data", "model", "context", "expert"
MESHES = [
    ((2, 2, 2), AUTO),
    ((2, 2, 2, 1), EXPLICIT),
]
SPLIT_BY_ALL = jax.P("data", "context", "model")


def mesh_of(shape, kind=AUTO):
    return jax.make_mesh(shape, NAMES[: len(shape)], (kind,) * len(shape))


def placed(mesh, *arrays, spec=SPLIT_BY_ALL):
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays]


def loss_of(attend):
    return lambda *arrays: (attend(*arrays) ** 2).sum()


def moved(compiled):
    """Return what a program moves: names and shapes of its operations."""
    kinds = "all-gather|all-reduce|custom-call|collective-permute|all-to-all"
    found = re.findall(rf"= \(?(\w+\[[\d,]*\])\S* ({kinds})\(", compiled.as_text())
    return collections.Counter(found)


@pytest.mark.parametrize(("shape", "kind"), MESHES)
def test_it_computes_and_moves_what_a_full_shard_map_does(shape, kind):
    """By the compiled programs: no device gathers, or computes a copy."""
    mesh = mesh_of(shape, kind)
    arrays = split.inputs((4, 8, 4, 4), (4, 8, 2, 4))[:3]
    layout = jaxcomm.Layout("contiguous", 2, 8)
    asked = SPLIT_BY_ALL if kind == AUTO else jax.P(None, "context")

    @jax.shard_map(mesh=mesh, in_specs=(SPLIT_BY_ALL,) * 3, out_specs=SPLIT_BY_ALL)
    def reference(*arrays):
        return jaxcomm.ring_attention(*arrays, "context", layout)

    def ours(*arrays):
        return jaxcomm.dot_product_attention(*arrays, sharding=asked, strategy="ring")

    given = placed(mesh, *arrays)
    oracle = jax.nn.dot_product_attention
    for of in (lambda f: f, lambda f: jax.grad(loss_of(f), (0, 1, 2))):
        with jax.set_mesh(mesh):
            found, expected = (
                jax.jit(of(f)).lower(*given).compile() for f in (ours, reference)
            )
            results = jax.tree.leaves(found(*given))
        assert moved(found) == moved(expected)
        ours_bytes, their_bytes = (
            x.memory_analysis().temp_size_in_bytes for x in (found, expected)
        )
        assert ours_bytes <= 1.1 * their_bytes
        for one, other in zip(
            results, jax.tree.leaves(of(oracle)(*arrays)), strict=True
        ):
            assert one.sharding.spec[:3] == SPLIT_BY_ALL[:3]
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "strategy": "ulysses"}])
def test_all_that_has_rows_or_heads_is_split_with_them(options):
    """Bias, mask, documents, sinks, slopes; and key heads that are fewer than ranks."""
    mesh = mesh_of((2, 2, 2))
    *arrays, grads = split.inputs((2, 7, 4, 8), (2, 7, 1, 8))
    rng = np.random.default_rng(3)
    given = dense.Options(
        is_causal=bool(options),
        bias=jnp.asarray(rng.normal(size=(2, 4, 7, 7)), "float32"),
        mask=jnp.asarray(rng.random((1, 1, 1, 7)) < 0.8).at[..., 0].set(True),
        query_ids=np.sort(rng.integers(0, 2, (2, 7)), 1),
        key_ids=np.sort(rng.integers(0, 2, (2, 7)), 1),
        key_lengths=np.array([5, 7]),
        sinks=jnp.asarray(rng.normal(size=4), "float32"),
        slopes=jnp.asarray(rng.random(4), "float32"),
    )

    def attend(query, key, value, bias, slopes, sinks):
        return jaxcomm.dot_product_attention(
            query, key, value, bias, given.mask, sinks=sinks, alibi_slopes=slopes,
            sharding=jax.NamedSharding(mesh, SPLIT_BY_ALL),
            segment_ids=(given.query_ids, given.key_ids),
            key_value_seq_lengths=given.key_lengths, return_residual=True, **options,
        )  # fmt: skip

    trained = (*arrays, given.bias, given.slopes, given.sinks)
    (out, lse), transpose = jax.vjp(jax.jit(attend), *trained)
    expected = dense.attention(*arrays, given, grads)
    split.assert_close((out, lse, *transpose(grads)), expected)


def test_ranges_are_split_with_the_tokens_of_queries_and_keys():
    """Of one row for all, of each, and of a number that int32 does not hold."""
    *arrays, grads = split.inputs((2, 7, 4, 8), (2, 9, 2, 8))
    first = np.arange(9) // 2
    given = dense.Options(
        mask=Ranges(
            keys=(np.array([[0] * 7, [1, 2, 3, 4, 5, 6, 6]]), np.array([5] * 6 + [0])),
            queries=(first, np.where(first % 2, first + 4, np.iinfo(np.int64).max)),
        )
    )
    whole = dataclasses.replace(
        given,
        mask=jax.tree.map(lambda x: np.broadcast_to(x, (2, x.shape[-1])), given.mask),
    )

    def attend(*arrays):
        return jaxcomm.dot_product_attention(
            *arrays, mask=given.mask, return_residual=True,
            sharding=jax.NamedSharding(mesh_of((2, 2, 2)), SPLIT_BY_ALL),
        )  # fmt: skip

    (out, lse), transpose = jax.vjp(jax.jit(attend), *arrays)
    expected = dense.attention(*arrays, whole, grads)
    split.assert_close((out, lse, *transpose(grads)), expected[:5])


def test_ranges_without_a_batch_are_of_each_token():
    x, end = split.inputs((5, 2, 4))[0], np.array([1, 3, 5, 2, 4])
    sharding = jax.NamedSharding(split.ring_over(2), jax.P("context"))

    def attend(end):
        mask = Ranges(keys=([0] * 5, end))
        return jaxcomm.dot_product_attention(x, x, x, mask=mask, sharding=sharding)

    sees = np.arange(5) < end[:, None]
    expected = jax.nn.dot_product_attention(x, x, x, mask=sees[None])
    for given in (end, end[None]):
        np.testing.assert_allclose(attend(given), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"end has shape \(1,\), and \(5,\) is"):
        attend(end[:1])


def test_dropout_does_not_depend_on_the_mesh():
    x = jnp.ones((4, 8, 4, 4))
    found, alone = (
        jaxcomm.dot_product_attention(
            x, x, x, sharding=sharding, dropout=(0.5, jax.random.key(1))
        )
        for sharding in (
            jax.NamedSharding(mesh_of((2, 2, 2)), SPLIT_BY_ALL),
            split.over_ring(1),
        )
    )
    np.testing.assert_allclose(found, alone, atol=1e-6)
    assert len(np.unique(np.round(found[..., 0], 4))) > 4


@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [
        ((EXPLICIT, AUTO), 7),
        ((AUTO, EXPLICIT), 8),
        ((EXPLICIT, EXPLICIT), 7),
    ],
)
def test_a_mesh_may_have_axes_of_both_types(kinds, tokens):
    """And each of them may hold tokens that it does not divide."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), kinds)
    x = split.inputs((4, tokens, 2, 4))[0]

    def attend(x):
        return jaxcomm.dot_product_attention(
            x, x, x, sharding=jax.P("data", "context"), is_causal=True
        )

    def expected(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True)

    with jax.set_mesh(mesh):
        found = jax.jit(attend)(x), jax.jit(jax.grad(loss_of(attend)))(x)
    wanted = expected(x), jax.grad(loss_of(expected))(x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5), found, wanted
    )


# More are in support/refusals.py.
REFUSED: list = [
    (jax.P("data", "context"), (2, 4, 2, 4), r"\['model'\], and nothing says what"),
    (jax.P("dta", "context", "model"), (2, 4, 2, 4), "has no axis 'dta'"),
    (jax.P("data"), (2, 4, 2, 4), "names no axis for the tokens"),
    (SPLIT_BY_ALL, (2, 4, 3, 4), "do not divide 3"),
    (SPLIT_BY_ALL, (3, 4, 2, 4), "do not divide 3 .* Pad the batch, or pass one"),
    (SPLIT_BY_ALL, (4, 2, 4), "splits more than batch, tokens and heads"),
]


@pytest.mark.parametrize(("spec", "shape", "text"), REFUSED)
def test_an_axis_that_nobody_named_is_refused_and_so_is_a_wrong_name(spec, shape, text):
    x = jnp.ones(shape)
    with (
        jax.set_mesh(mesh_of((2, 2, 2))),
        pytest.raises(ValueError, match=f"dot_product_attention: .*{text}"),
    ):
        jaxcomm.dot_product_attention(x, x, x, sharding=spec)


@pytest.mark.parametrize(
    ("spec", "asked", "text"),
    [
        (jax.P("data"), (), r"\['model'\], and nothing says what they split"),
        (jax.P("data", None, None, "model"), (), "head size. sharding= names"),
        (SPLIT_BY_ALL, ("data",), "splits the heads by"),
        (jax.P("data"), ("data",), "'data' twice"),
    ],
)
def test_types_that_say_otherwise_are_refused(spec, asked, text):
    mesh = mesh_of((2, 2, 2), EXPLICIT)
    (x,) = placed(mesh, jnp.ones((2, 4, 2, 4)), spec=spec)
    asked = jax.P(None, "context", *asked)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=text):
        jaxcomm.dot_product_attention(x, x, x, sharding=asked)


@pytest.fixture
def compiled():
    """A list that gets longer by one for each program that XLA compiles."""
    found = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_outside_of_jit_it_is_one_program_compiled_once(compiled):
    x, mesh = split.inputs((1, 12, 2, 8))[0], split.ring_over(2)
    compiled.clear()

    def attend(**options):
        return jaxcomm.dot_product_attention(
            x, x, x, sharding=split.over_ring(2), is_causal=True, strategy="ring",
            **options,
        )  # fmt: skip

    found = [attend(), attend()]
    assert 1 <= len(compiled) <= 3
    jax.block_until_ready(found)
    # Of another communicator: nothing is compiled again.
    other = jaxcomm.init(mesh, "context", lanes=("other",))
    before = len(compiled)
    attend()
    other[0].close()
    attend()
    assert len(compiled) <= before + 1
    # It names a communicator that is closed then, and is compiled again.
    jaxcomm.finalize()
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    for out in (*found, attend()):
        np.testing.assert_array_equal(out, found[0])
        np.testing.assert_allclose(out, expected, atol=1e-5)
    # What init chooses holds for the next call.
    jaxcomm.finalize()
    jaxcomm.init(mesh, "context", backend="xla")
    np.testing.assert_array_equal(attend(), found[0])
    assert {each.backend for each in jaxcomm.communicators()} == {"xla"}
    jaxcomm.finalize()
    attend()
    with jaxcomm.using(backend="xla", lane="scope"):
        attend()
    found = [(each.backend, each.lane) for each in jaxcomm.communicators()]
    assert found == [("host", "default"), ("xla", "scope")]
    with pytest.raises(TypeError, match="local_window_size"):
        attend(local_window_size=np.array([3, 0]))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"axis 'nowhere' is not in the mesh \{'con"),
    ):
        jaxcomm.dot_product_attention(x, x, x, sharding=jax.P(None, "nowhere"))


def test_a_mask_and_a_bias_of_fewer_dimensions_broadcast_as_in_jax_nn():
    """A large bias is added, if it is above that of keys that are hidden."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 4))
    # Each token sees itself: where a row sees no key, jax.nn gives a mean.
    sees = jax.random.bernoulli(jax.random.key(1), 0.5, (5, 5)) | jnp.eye(5, dtype=bool)
    options = {"mask": sees, "bias": jnp.arange(5.0) - 1000}
    expected = jax.nn.dot_product_attention(x, x, x, **options)
    found = jaxcomm.dot_product_attention(
        x, x, x, sharding=split.over_ring(2), strategy="all_gather", **options
    )
    # Scores of a thousand have fewer digits.
    np.testing.assert_allclose(found, expected, atol=1e-3)
    with pytest.raises(
        ValueError, match=r"bias has shape \(1, 1, 1, 4\), and does not"
    ):
        jaxcomm.dot_product_attention(
            x, x, x, sharding=split.over_ring(2), bias=jnp.ones(4)
        )


def test_a_mask_hides_keys_where_the_dtype_of_the_bias_has_no_infinity():
    x, sees = jax.random.normal(jax.random.key(0), (1, 4, 2, 4)), jnp.arange(4) < 3
    found = jaxcomm.dot_product_attention(
        x, x, x, sharding=split.over_ring(2), mask=sees,
        bias=jnp.ones(4, jnp.float8_e4m3fn),
    )  # fmt: skip
    expected = jax.nn.dot_product_attention(x, x, x, mask=sees[None, None, None])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_batch_of_one_is_a_copy_on_the_axes_of_batches(kind):
    """As layers get it that make their parameters."""
    *arrays, (grad, _) = split.inputs((1, 8, 2, 4))
    with jax.set_mesh(mesh_of((2, 2, 2), kind)):
        attend = functools.partial(jaxcomm.dot_product_attention, sharding=SPLIT_BY_ALL)
        found = split.results(attend, arrays, grad)
    split.assert_results(found, arrays, grad, split.PLAIN)


def test_a_batch_may_be_empty():
    """Where tokens move to zigzag, and key heads are repeated."""
    x = jnp.zeros((0, 8, 2, 4))

    def loss(query, key):
        return jaxcomm.dot_product_attention(
            query, key, key, sharding=split.over_ring(2), is_causal=True,
            strategy="ulysses",
        ).sum()  # fmt: skip

    found = jax.grad(loss, (0, 1))(x, x[:, :, :1])
    assert [grad.shape for grad in found] == [(0, 8, 2, 4), (0, 8, 1, 4)]


@pytest.mark.parametrize(
    ("dtype", "low", "cap", "strategy"),
    [
        # Float16 has about the same, below.
        pytest.param("float32", -60_000, None, "ring", marks=pytest.mark.thorough),
        ("float32", jnp.finfo("float32").min, None, "ulysses"),
        # No cap shows what it hides.
        ("float32", -1e9, 2.0, "ring"),
        ("float16", jnp.finfo("float16").min, None, "ring"),
    ],
)
def test_a_low_bias_hides_keys_as_a_mask_does(dtype, low, cap, strategy):
    *arrays, grads = split.inputs((2, 12, 4, 8))
    # Rows 4 and 5 see nothing.
    seen = np.random.default_rng(5).random((1, 1, 12, 12)) < 0.6
    seen[..., 4:6, :] = False
    bias = jnp.where(seen, 0, low).astype(dtype)
    given = dense.Options(bias=bias, cap=cap)
    found = split.attend(*arrays, given, grads, size=2, strategy=strategy)
    meant = dense.Options(bias=0.0 * seen, mask=seen, cap=cap)
    expected = dense.attention(*arrays, meant, grads)
    # The gradient of a short bias is as short.
    split.assert_close(found, expected, 1e-5 if dtype == "float32" else 1e-2)
    split.assert_close(found[:5], expected, 1e-5)
    assert not found.out[:, 4:6].any()


def test_inside_a_shard_map_it_splits_over_the_other_axes():
    mesh = mesh_of((2, 2, 2))
    x = split.inputs((4, 8, 2, 4))[0]

    @jax.jit
    @jax.shard_map(in_specs=jax.P("data"), out_specs=jax.P("data"), axis_names={"data"})
    def attend(x):
        return jaxcomm.dot_product_attention(
            x, x, x, sharding=jax.P(None, "context", "model"), strategy="all_gather"
        )

    with jax.set_mesh(mesh):
        found = attend(x)
    np.testing.assert_allclose(found, jax.nn.dot_product_attention(x, x, x), atol=1e-5)
