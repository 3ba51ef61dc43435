import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import library
from language_model import data, model, reference, step

# In `make test`, test_main.py compares the losses with those of one device.
pytestmark = pytest.mark.thorough
CONFIG = model.ModelConfig(layers=2, width=32)
TEXT = data.Documents(
    np.frombuffer(b"for x in range(10): print(x, end='')\n" * 40, np.uint8),
    np.array([0, 100, 117, 800, 1200]),
)
WINDOW = 10
# Losses are means of float32 sums in two orders; what Adam divides by is as small as
# the gradients, so their rounding is all that differs.
TOLERANCE = 1e-5
OPTIMIZER = step.make_optimizer(1e-2)


def batch(number, rows, length):
    return data.draw_batch(TEXT, number, rows=rows, sequence=length, seed=0)


def begin(mesh, length, schedule):
    """Return a program, its compiled step, and the state to start from."""
    program = step.MeshProgram(mesh, length, schedule, OPTIMIZER, WINDOW)
    start = jax.device_get(step.init_state(0, CONFIG, OPTIMIZER))
    state = jax.device_put(start, program.replicated)
    return program, program.train.lower(state, *program.batch_shape()).compile(), state


def losses_on_one_device(count, rows, length):
    train = reference.make_train(OPTIMIZER, WINDOW)
    state = jax.device_put(step.init_state(0, CONFIG, OPTIMIZER), jax.devices()[0])
    losses = []
    for number in range(count):
        state, loss = train(state, batch(number, rows, length))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("schedule", "length", "extents"),
    [("striped", 61, (1, 3)), ("zigzag", 64, (2, 2))],
    ids=["striped-uneven", "zigzag"],
)
def test_takes_the_steps_of_one_device(make_mesh, schedule, length, extents):
    rows, ring = extents
    mesh = make_mesh(data=rows, context=ring)
    program, compiled, state = begin(mesh, length, schedule)
    # The gradients of all parameters travel in one call and the loss in another; a
    # layer sends N - 1 times forward and N times backward, in loops over the
    # layers and over the hops.
    ours, of_xla = jaxcomm.collectives_of(compiled).totals
    assert of_xla == 0
    assert ours > 2

    losses = []
    for number in range(3):
        state, loss = compiled(state, *program.deal(batch(number, rows, length)))
        losses.append(float(loss))
    assert losses == pytest.approx(
        losses_on_one_device(3, rows, length), abs=TOLERANCE, rel=0
    )
    calls = {c.axes: c.stats()["calls"] for c in jaxcomm.communicators()}
    assert calls["data", "context"] == {"all_reduce": 2 * 3}
    # All layers have the same positions, which are compared once a step.
    sends = 3 * CONFIG.layers * (2 * ring - 1)
    found = calls["context",]
    if rows == 1:  # No other axis: the ranks agree how far keys must travel.
        asked = found.pop("all_gather"), found.pop("all_reduce")
        assert asked == (3, 3 * CONFIG.layers)
    assert found == {"check_positions": 3, "permute": sends}

    for leaf in jax.tree.leaves(state):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("backend", ["nccl", "xla"])
def test_trains_and_evaluates_on_every_backend(
    make_mesh, backend, stand_in_path, monkeypatch
):
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    library.load.cache_clear()
    mesh = make_mesh(data=2, context=2)
    jaxcomm.init(mesh, ["context", step.AXES], backend=backend)
    program, compiled, state = begin(mesh, 32, "zigzag")
    evaluated = program.evaluate(state, *program.deal(batch(0, 2, 32)))
    losses = []
    for number in range(2):
        state, loss = compiled(state, *program.deal(batch(number, 2, 32)))
        losses.append(float(loss))
    expected = losses_on_one_device(2, 2, 32)
    assert losses == pytest.approx(expected, abs=TOLERANCE, rel=0)
    assert float(evaluated) == pytest.approx(expected[0], abs=TOLERANCE, rel=0)
    ours, of_xla = jaxcomm.collectives_of(compiled).totals
    assert (ours > 0, of_xla > 0) == (backend != "xla", backend == "xla")
    assert {c.backend for c in jaxcomm.communicators()} == {backend}
    library.load.cache_clear()
