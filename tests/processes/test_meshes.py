"""Meshes of every form over the devices of several processes, and groups."""

import math

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Processes, devices of each, shape, names, order of the devices; and the axes.
MESHES = {
    "a line whose processes alternate": (
        (4, 2, -1, ("i",), (0, 2, 4, 6, 1, 3, 5, 7)), ("i",),
    ),
    "one process with more, between the others": (
        (3, (1, 2, 1), -1, ("i",), (1, 0, 3, 2)), ("i",),
    ),
    "both axes in disorder": (
        (3, 2, (2, 3), ("a", "b"), (5, 1, 4, 0, 3, 2)), ("b", "a"),
    ),
    "rows within, rows across": (
        (3, 2, (3, 2), ("a", "b"), (0, 1, 2, 4, 3, 5)), ("b",),
    ),
    "an axis of one device and another": (
        (4, 1, (1, 4), ("one", "b")), ("b", "one"),
    ),
}  # fmt: skip


def collectives_on_a_mesh(here, mesh, axes):
    size = math.prod(mesh.shape[axis] for axis in axes)
    shape = (mesh.size, size, 2, 3)
    # 1 and -1 get lost beside 2**30, which then cancels: another order of additions
    # shows.
    rng = np.random.default_rng(0)
    floats = rng.choice([-1, 1], shape) * np.exp2(30 * rng.integers(0, 2, shape))
    x = {
        "int32": here.values("int32", shape, 0),
        "bfloat16": floats.astype(jnp.bfloat16),
        "float32": floats.astype(np.float32),
    }
    found = here.run(mesh, lambda x: here.every(x, axes, size), x)
    for name, (case, group_model) in here.models(size).items():
        ranked = axes
        if case.in_mesh_order:
            ranked = sorted(axes, key=mesh.axis_names.index)
        here.are_modelled(mesh, ranked, found, {name: (case, group_model)}, x)
    assert {member.backend for member in jaxcomm.communicators()} == {"host"}


@pytest.mark.parametrize("case", MESHES)
def test_every_collective_is_its_model_on_every_mesh(team, case):
    at, axes = MESHES[case]
    team.call(collectives_on_a_mesh, at, axes=axes)


GROUPS = {
    "some within, some across": [[0, 1, 2, 4], [3, 5, 7, 6]],
    "of unequal sizes": [[2, 0, 5], [1], [7, 6, 4, 3]],
}


def collectives_within_groups(here, groups):
    mesh = here.mesh(4, 2)
    x, choice = here.values("int32", (8, 4, 6), 0), catalogue.fixed(4)
    is_equal = len({len(group) for group in groups}) == 1
    cases = {
        name: case
        for name, case in here.cases.items()
        if case.takes_groups and (is_equal or case.target == "all_reduce")
    }

    def program(x):
        at = {"axis_index_groups": groups}
        return {n: c(jaxcomm, x, "i", choice, **at) for n, c in cases.items()}

    models = {name: (case, case.model(choice)) for name, case in cases.items()}
    here.are_modelled(mesh, ("i",), here.run(mesh, program, x), models, x, groups)


@pytest.mark.parametrize("case", GROUPS)
def test_index_groups_divide_processes_in_every_way(team, case):
    team.call(collectives_within_groups, groups=GROUPS[case])


def sizes_that_do_not_fit(here, mesh):
    size = mesh.size
    ones = np.ones((size, size), np.int32)
    base = np.tile(np.arange(size, dtype=np.int32), (size, 1))
    wrong = ones.copy()
    wrong[3, 0] = 2
    x = np.arange(size * size, dtype=np.float32).reshape(size, size)

    def program(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i")

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), wrong)
    # Right ones raise too, until the processes agree anew.
    with pytest.raises(jax.errors.JaxRuntimeError, match="refused, since a collective"):
        here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), ones)
    jaxcomm.finalize()
    found = here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), ones)
    here.identical(mesh, found, x.T)
    return str(caught.value)


def test_sizes_that_do_not_fit_raise_on_every_process(team):
    texts = team.call(sizes_that_do_not_fit, at=(2, 2))
    for text in texts[:2]:
        assert "ragged_all_to_all" in text
        assert "rank 0 sends 1 rows to rank 3, which expects 2" in text


def the_same_program_everywhere(here):
    """The mesh is of processes 1 and 2; all run the same, as with ``jax.lax``."""
    line = [device for device in jax.devices() if device.process_index in (1, 2)]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(np.array(line), ("i",), axis_types=auto)
    x = here.values("int32", (4, 3), 0)
    found = []
    for psum in (jax.lax.psum, jaxcomm.psum):
        run = here.program(mesh, lambda x, psum=psum: psum(x, "i"))
        total = run(here.put(mesh, x))
        jax.block_until_ready(total)
        if here.rows(mesh):
            here.identical(
                mesh, here.mine(total), np.broadcast_to(x.sum(0, np.int32), x.shape)
            )
        found.append(len(total.addressable_shards))
    (made,) = jaxcomm.init(mesh)
    assert made in jaxcomm.communicators()
    assert made.size == 4
    made.close()
    jaxcomm.init(mesh, "i", lanes="other", backend="host")
    return found, made.transport


def test_a_process_without_devices_in_the_mesh_runs_the_same_program(team):
    outside, member = team.call(the_same_program_everywhere)[:2]
    assert outside == [[0, 0], "xla: process 0 has no device in the mesh"]
    assert member == [[2, 2], "shared memory"]
