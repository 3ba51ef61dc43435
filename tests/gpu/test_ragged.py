"""Slices of uneven sizes between NVIDIA GPUs, sent in the sizes that devices hold."""

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.primitives import nccl_rewrites

pytestmark = pytest.mark.gpu

SPLIT = jax.P("i")
EACH = 3  # slices of a rank to a rank


BY_GPUS = jaxcomm.CommPolicy(device_sizes=True, on_failure="poison")


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    """Small operands would be gathered."""
    monkeypatch.setattr(nccl_rewrites, "_GATHERED_BYTES", -1)


@pytest.fixture(params=["hosts read sizes", "GPUs do"])
def reads(request, ring):
    """Who reads offsets and sizes."""
    by_gpus = request.param == "GPUs do"
    (of_ring,) = jaxcomm.init(ring, "i", policy=BY_GPUS if by_gpus else None)
    yield of_ring
    counted = of_ring.stats()["device_sized_calls"]
    assert (counted > 0) == by_gpus, of_ring.stats()["device_sizes"]


def slices(size, rows):
    """Return starts, sizes, places and expected sizes, (size, size * EACH) each."""
    send = np.random.default_rng(1).integers(0, rows, (size, size, EACH))
    send[0, -1] = 0  # rank 0 sends nothing to the last
    received = send.transpose(1, 0, 2).reshape(size, -1)
    places = (np.cumsum(received, 1) - received).reshape(size, size, EACH)
    send = send.reshape(size, -1)
    found = np.cumsum(send, 1) - send, send, places.transpose(1, 0, 2), received
    return [x.reshape(size, -1).astype(np.int32) for x in found]


def arrived(x, out, starts, sizes, places):
    result = out.copy()
    for source, i in np.ndindex(*starts.shape):
        begin, count, place = (int(a[source, i]) for a in (starts, sizes, places))
        result[i // EACH, place : place + count] = x[source, begin : begin + count]
    return result


def of_ranks(mesh, function, *operands):
    """Return what the ranks of this process get of a result, (1, ...) each."""
    sharding = jax.NamedSharding(mesh, SPLIT)
    operands = [jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
                for x in operands]  # fmt: skip

    def on_rank(*operands):
        return jax.tree.map(lambda x: x[None], function(*(x[0] for x in operands)))

    whole = jax.shard_map(on_rank, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    return jax.block_until_ready(jax.jit(whole)(*operands))


def check(found, expected):
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def exchange(*operands):
    return jaxcomm.ragged_all_to_all(*operands, axis_name="i")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_and_their_gradients_are_numpy_s(ring, reads, gpus, dtype):
    size, most = ring.size, 1000 if gpus else 4
    starts, sizes, places, expected = slices(size, most)
    rows, width = size * EACH * most, 129
    random = np.random.default_rng(0)
    x, out, weights = random.integers(-99, 99, (3, size, rows, width)).astype(dtype)

    def program(x, out, weights, *numbers):
        result, transpose = jax.vjp(lambda x: exchange(x, out, *numbers), x)
        return result, transpose(weights)[0]

    numbers = starts, sizes, places, expected
    result, back = of_ranks(ring, program, x, out, weights, *numbers)
    check(result, arrived(x, out, starts, sizes, places))
    returned = np.zeros_like(x)
    for source, i in np.ndindex(*starts.shape):
        begin, count, place = (int(a[source, i]) for a in (starts, sizes, places))
        returned[source, begin : begin + count] = weights[
            i // EACH, place : place + count
        ]
    check(back, returned)


def wrong_slices(size):
    wrong = slices(size, 4)
    wrong[0][-1, 0] = size * EACH * 4 + 1
    return wrong


def test_what_does_not_fit_raises_on_every_rank_and_the_next_call_works(ring):
    numbers = slices(ring.size, 4)
    x = np.ones((ring.size, ring.size * EACH * 4), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"slice 0 of rank .* takes"):
        of_ranks(ring, exchange, x, 0 * x, *wrong_slices(ring.size))
    check(of_ranks(ring, exchange, x, 0 * x, *numbers), arrived(x, 0 * x, *numbers[:3]))


def test_what_does_not_fit_is_nan_on_every_rank_where_gpus_read_sizes(ring):
    jaxcomm.init(ring, "i", policy=BY_GPUS)
    numbers = slices(ring.size, 4)
    x = np.ones((ring.size, ring.size * EACH * 4), np.float32)
    check(of_ranks(ring, exchange, x, 0 * x, *wrong_slices(ring.size)), np.nan * x)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"slice 0 of rank .* takes"):
        of_ranks(ring, exchange, x, 0 * x, *numbers)
    jaxcomm.finalize()
    jaxcomm.init(ring, "i", policy=BY_GPUS)
    check(of_ranks(ring, exchange, x, 0 * x, *numbers), arrived(x, 0 * x, *numbers[:3]))
