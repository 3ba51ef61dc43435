"""Programs over stacked operands, and what they should give: see support/models.py.

Every test runs over the host backend, then over NCCL, for which the stand-in stands in.
"""

import math

import jax
import models
import numpy as np
import pytest


def pytest_generate_tests(metafunc):
    metafunc.parametrize("default_backend", ["host", "nccl"], indirect=True)


def pytest_collection_modifyitems(items):
    """Leaves out what is marked ``host_only`` over NCCL: a test, or a case of it."""

    def is_kept(item):
        if not item.get_closest_marker("host_only"):
            return True
        return item.callspec.params["default_backend"] == "host"

    items[:] = filter(is_kept, items)


@pytest.fixture(autouse=True)
def default_backend(request):
    """What serves the communicators nobody chose a backend for: "host" or "nccl"."""
    if request.param == "nccl":
        request.getfixturevalue("stand_in")
    return request.param


def _giving(value):
    return pytest.fixture(scope="session")(lambda: value)


# What tests compare to and with; support/models.py describes each.
model = _giving(models)
stacked = _giving(models.run_stacked)
by_group = _giving(models.apply_by_group)
identical = _giving(models.assert_identical)
near = _giving(models.assert_near)
values = _giving(models.random_values)


@pytest.fixture(scope="session")
def mesh_of():
    def make(shape, names, devices=None):
        order = range(math.prod(shape)) if devices is None else devices
        chosen = np.array([jax.devices()[i] for i in order]).reshape(shape)
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(chosen, names, axis_types=auto)

    return make


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((4,), ("i",))


@pytest.fixture
def x(values):
    return values("float32", (4, 4, 8))


@pytest.fixture
def trace(mesh_of):
    """Gives ``trace(call)``: traces it in shard_map on 4 devices along "i".

    The call's operand is (6,) float32 unless another is given.
    """
    mesh, operands = mesh_of((4,), ("i",)), np.zeros((4, 6), np.float32)

    def run(call, x=operands, check_vma=True):
        def local(x):
            return call(jax.tree.map(lambda leaf: leaf[0], x))[None]

        return models.over(mesh, local, check_vma=check_vma).trace(x)

    return run
