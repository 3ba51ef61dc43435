"""Every collective that can be had in two halves, under the names of jax.lax."""

import catalogue
import pytest


@pytest.fixture(scope="session")
def by_halves():
    """A library like jax.lax, whose calls are a start, a computation and a done."""
    return catalogue.SPLIT_PHASE


@pytest.fixture
def mesh(mesh_of):
    """Four devices along "i"."""
    return mesh_of((4,), ("i",))
