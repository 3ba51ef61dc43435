"""Collectives in two halves between processes."""

import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def every_pair(here, mesh, count):
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
        meanwhile = here.busy(x[0], turns)
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
    models = {name: (None, each) for name, each in models.items()}
    run = here.program(mesh, program)
    rng = np.random.default_rng(0)
    for seed in range(10):
        x = here.values("int32", (size, size * 2, count), seed)
        turns = rng.integers(0, 30_000, size).astype(np.int32)
        found = here.mine(run(*here.put(mesh, (x, turns))))
        here.are_modelled(mesh, ("i",), found, models, x)


@pytest.mark.parametrize(("at", "count"), [((2, 2), 0), ((3, 1), 3), ((2, 2), 40_000)])
def test_pairs_under_way_at_once_keep_apart(team, at, count):
    team.call(every_pair, at, count=count)
