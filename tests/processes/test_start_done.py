"""Collectives in two halves between processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting

import jaxcomm

pytestmark = pytest.mark.multiprocess


def busy(x, turns):
    """Returns ``x`` after so many turns of a loop that XLA cannot drop."""
    spent = jax.lax.fori_loop(0, turns, lambda k, v: (v * 3 + k) % 7, jnp.int32(0))
    return x + jnp.minimum(spent, 0).astype(x.dtype)


def every_pair(here, processes, devices, count):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    size, model = mesh.size, here.model
    ring = [(k, (k + 1) % size) for k in range(size)]

    def program(x, turns):
        handles = {
            "ppermute": jaxcomm.ppermute_start(x, "i", ring),
            "ring_shift": jaxcomm.ring_shift_start(x, "i", -1),
            "psum": jaxcomm.psum_start(x, "i"),
            "all_gather": jaxcomm.all_gather_start(x, "i", axis=1),
            "psum_scatter": jaxcomm.psum_scatter_start(x, "i", tiled=True),
            "all_to_all": jaxcomm.all_to_all_start(x, "i", 0, 1, tiled=True),
        }
        # Some processes come to their dones late, and others to their next starts.
        meanwhile = busy(x[0], turns)
        return {
            name: handle.done(after=meanwhile)
            for name, handle in reversed(handles.items())
        }

    models = {
        "ppermute": model.permute(ring),
        "ring_shift": model.permute([(target, source) for source, target in ring]),
        "psum": model.all_reduce("sum"),
        "all_gather": model.all_gather(1),
        "psum_scatter": model.reduce_scatter(tiled=True),
        "all_to_all": model.all_to_all(0, 1, tiled=True),
    }
    run = here.program(mesh, program)
    rng = np.random.default_rng(0)
    for seed in range(10):
        x = here.values("int32", (size, size * 2, count), seed)
        turns = rng.integers(0, 30_000, size).astype(np.int32)
        found = here.mine(run(*here.put(mesh, (x, turns))))
        for name, group_model in models.items():
            expected = here.by_group(mesh, ("i",), group_model, x)
            here.identical(mesh, found[name], expected, f"{name}, run {seed}")


@pytest.mark.parametrize(
    ("processes", "devices", "count"), [(2, 2, 0), (3, 1, 3), (2, 2, 40_000)]
)
def test_pairs_under_way_at_once_keep_apart(team, processes, devices, count):
    team.call(every_pair, processes=processes, devices=devices, count=count)


def a_process_that_stays_away(here):
    mesh = here.mesh(2, 1)
    if mesh is None:
        return None

    def program(x):
        handle = jaxcomm.psum_start(x, "i")
        return handle.done(after=jnp.sin(x))

    x = here.put(mesh, np.ones((2, 3), np.float32))
    jaxcomm.init(mesh, timeout=waiting.EXPIRES_SECONDS)
    run = here.program(mesh, program).lower(x).compile()
    text = ""
    if here.process == 0:
        try:
            jax.block_until_ready(run(x))
        except RuntimeError as error:
            text = str(error)
    here.meet("the other has waited", [0, 1])
    return text


def test_a_process_that_stays_away_is_an_error_on_the_other(team):
    text, *_ = team.call(a_process_that_stays_away)
    assert "psum_start(float32[3])" in text
    assert "over axes ('i',)" in text
    assert "s for rank 1" in text
