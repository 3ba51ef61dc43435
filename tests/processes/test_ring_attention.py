"""A ring of devices of several processes, against dense attention in float64."""

import jax
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def attention_in_a_ring(here, processes, devices, order, schedule, is_causal):
    oracle = here.load("attention/conftest.py")
    mesh = here.mesh(processes, devices, names=("context",), order=order)
    if mesh is None:
        return
    # 45 tokens divide by none of the sizes; 4 heads of queries share 2 of keys.
    *arrays, grads = oracle.random_inputs((2, 45, 4, 8), (2, 45, 2, 8))
    split = jax.P(None, "context")

    def local(query, key, value):
        return jaxcomm.ring_attention(
            query, key, value, axis_name="context", is_causal=is_causal,
            schedule=schedule, length=45, key_length=45, return_residual=True,
        )  # fmt: skip

    attend = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)

    @jax.jit
    def run(arrays, grads):
        result, transpose = jax.vjp(attend, *arrays)
        return *result, *transpose(grads)

    def deal(x):
        return np.asarray(jaxcomm.reorder(x, mesh.size, schedule=schedule))

    def put(x):
        sharding = jax.NamedSharding(mesh, split)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    found = run(*jax.tree.map(lambda x: put(deal(x)), (arrays, grads)))
    expected = oracle.dense_attention(*arrays, is_causal=is_causal, grads=grads)
    # The padding may hold anything.
    real = deal(np.ones((2, 45), bool))
    for name, ours, dense in zip(expected._fields, found, expected, strict=True):
        dense = deal(dense.astype(np.float32))
        assert ours.shape == dense.shape, name
        for shard in ours.addressable_shards:
            error = np.abs(np.asarray(shard.data) - dense[shard.index])
            worst = error[real[shard.index[:2]]].max()
            assert worst <= 1e-5 * max(1.0, np.abs(dense).max()), (name, worst)


@pytest.mark.parametrize(
    ("processes", "devices", "order", "schedule", "is_causal"),
    [
        (2, 2, None, "zigzag", True),
        (3, 1, (2, 0, 1), "contiguous", False),
    ],
)
def test_forward_and_backward_equal_dense_attention(
    team, processes, devices, order, schedule, is_causal
):
    team.call(
        attention_in_a_ring, processes=processes, devices=devices, order=order,
        schedule=schedule, is_causal=is_causal,
    )  # fmt: skip
