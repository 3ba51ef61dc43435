import functools

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import library
from language_model import data, model, reference, step

CONFIG = model.ModelConfig(layers=2, width=32)
TEXT = data.Documents(
    np.frombuffer(b"for x in range(10): print(x, end='')\n" * 40, np.uint8),
    np.array([0, 100, 117, 800, 1200]),
)
WINDOW = 10
# Losses are means of float32 sums in two orders; what Adam divides by is as small as
# the gradients, so their rounding is all that differs.
TOLERANCE = 1e-5


def batch(number, rows, length):
    return data.draw_batch(TEXT, number, rows=rows, sequence=length, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "length", "extents"),
    [("zigzag", 64, (2, 4)), ("striped", 61, (1, 3))],
    ids=["zigzag", "striped-uneven"],
)
def test_takes_the_steps_of_one_device(make_mesh, schedule, length, extents):
    rows, ring = extents
    mesh = make_mesh(data=rows, context=ring)
    optimizer = step.make_optimizer(1e-2)
    program = step.MeshProgram(mesh, length, schedule, optimizer, WINDOW)
    start = jax.device_get(step.init_state(0, CONFIG, optimizer))
    state = jax.device_put(start, program.replicated)
    compiled = program.train.lower(state, *program.batch_shape()).compile()

    # The gradients of all parameters travel in one call and the loss in another; a
    # layer sends N - 1 times forward and N times backward, in loops over the
    # layers and over the hops.
    ours, of_xla = jaxcomm.collectives_of(compiled).totals
    assert of_xla == 0
    assert ours > 2

    train = reference.make_train(optimizer, WINDOW)
    expected = jax.device_put(start, jax.devices()[0])
    for number in range(3):
        drawn = batch(number, rows, length)
        state, loss = compiled(state, *program.deal(drawn))
        expected, expected_loss = train(expected, drawn)
        assert abs(float(loss) - float(expected_loss)) < TOLERANCE
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


def test_evaluates_alike_on_every_backend(make_mesh):
    mesh = make_mesh(data=2, context=2)
    optimizer = step.make_optimizer(1e-2)
    losses, collectives = [], []
    for backend in ("host", "xla"):
        jaxcomm.init(mesh, ["context", step.AXES], backend=backend)
        program = step.MeshProgram(mesh, 32, "zigzag", optimizer, WINDOW)
        state = step.init_state(0, CONFIG, optimizer)
        state = jax.device_put(state, program.replicated)
        dealt = program.deal(batch(0, 2, 32))
        compiled = program.evaluate.lower(state, *dealt).compile()
        losses.append(float(compiled(state, *dealt)))
        collectives.append(jaxcomm.collectives_of(compiled).totals)
    assert abs(losses[0] - losses[1]) < TOLERANCE
    (ours, none), (no_more, of_xla) = collectives
    assert ours > 0
    assert none == 0
    assert no_more == 0
    assert of_xla > 0


def test_trains_over_nccl_as_on_the_host(make_mesh, stand_in_path, monkeypatch):
    mesh = make_mesh(data=2, context=2)
    optimizer = step.make_optimizer(1e-2)
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    library.load.cache_clear()
    losses = {}
    for backend in ("host", "nccl"):
        jaxcomm.init(mesh, ["context", step.AXES], backend=backend)
        program = step.MeshProgram(mesh, 32, "zigzag", optimizer, WINDOW)
        state = step.init_state(0, CONFIG, optimizer)
        state = jax.device_put(state, program.replicated)
        compiled = program.train.lower(state, *program.batch_shape()).compile()
        losses[backend] = []
        for number in range(2):
            dealt = program.deal(batch(number, 2, 32))
            state, loss = compiled(state, *dealt)
            losses[backend].append(float(loss))
        used = [c for c in jaxcomm.communicators() if c.backend == backend]
        assert all(c.stats()["calls"] for c in used)
        assert {c.axes for c in used} == {("context",), step.AXES}
        jaxcomm.finalize()
    library.load.cache_clear()
    assert losses["nccl"] == pytest.approx(losses["host"], abs=TOLERANCE)


def test_counts_the_collectives_of_xla(make_mesh):
    mesh = make_mesh(i=2)
    operations = {
        "all-reduce": functools.partial(jax.lax.psum, axis_name="i"),
        "all-gather": functools.partial(jax.lax.all_gather, axis_name="i"),
        "permute": functools.partial(jax.lax.ppermute, axis_name="i", perm=[(0, 1)]),
    }
    for name, operation in operations.items():
        mapped = jax.shard_map(
            operation,
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P() if name == "all-reduce" else jax.P("i"),
        )
        text = jax.jit(mapped).lower(np.ones(4, np.float32)).compile().as_text()
        assert jaxcomm.collectives_of(text).totals == (0, 1), name
