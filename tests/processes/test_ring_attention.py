"""A ring of devices of several processes, against dense attention in float64."""

import contextlib

import dense
import jax
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def attention_in_a_ring(here, mesh):
    # 45 tokens divide by none of the sizes; 4 heads of queries share 2 of keys.
    rng = np.random.default_rng(0)
    shapes = (2, 45, 4, 8), (2, 45, 2, 8), (2, 45, 2, 8), (2, 45, 4, 8), (2, 45, 4)
    *arrays, out, lse = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    grads = out, lse
    layout = jaxcomm.Layout("zigzag", mesh.size, 45)
    split = jax.P(None, "context")

    def local(query, key, value, tokens):
        return jaxcomm.ring_attention(
            query, key, value, "context", tokens, is_causal=True, return_residual=True
        )

    attend = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)

    @jax.jit
    def run(arrays, grads, tokens):
        result, transpose = jax.vjp(lambda *x: attend(*x, tokens), *arrays)
        return *result, *transpose(grads)

    def put(x):
        sharding = jax.NamedSharding(mesh, split)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    (*dealt, real), tokens = layout.reorder((arrays, grads, np.ones((2, 45), bool)))
    dealt = jax.tree.map(put, dealt)
    found = run(*dealt, jax.tree.map(put, tokens))
    options = dense.Options(is_causal=True)
    expected = dense.attention(*arrays, options, grads)
    # Tokens in their natural order, on ranks of several processes.
    (member,) = jaxcomm.communicators()
    wrong = np.arange(layout.size * layout.local_length, dtype=np.int32)
    wrong = put(np.stack([np.where(wrong < 45, wrong, -1)] * 2))
    wrong = jaxcomm.Tokens(layout, wrong)
    text = "does not hold the tokens that its layout says"
    raises = pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text)
    with raises if member.backend == "host" else contextlib.nullcontext():
        refused = jax.block_until_ready(run(*dealt, wrong))
    if member.backend != "host":  # No other backend can raise.
        shards = [np.asarray(x.data) for x in refused[0].addressable_shards]
        assert all(np.isnan(x).all() for x in shards)
    # The padding may hold anything.
    for name, ours, theirs in zip(expected._fields[:5], found, expected, strict=False):
        theirs, _ = layout.reorder(theirs.astype(np.float32))
        assert ours.shape == theirs.shape, name
        for shard in ours.addressable_shards:
            error = np.abs(np.asarray(shard.data) - theirs[shard.index])
            worst = error[real[shard.index[:2]]].max()
            assert worst <= 1e-5 * max(1.0, np.abs(theirs).max()), (name, worst)


def test_forward_and_backward_equal_dense_attention(team):
    team.call(attention_in_a_ring, at=(2, 2, -1, ("context",), (2, 0, 1, 3)))
