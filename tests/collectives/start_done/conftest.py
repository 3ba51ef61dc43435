"""Every collective that can be had in two halves, under the names of jax.lax."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomm


def between(start):
    """Returns start and done with a computation between them, as one function."""

    def call(x, *args, after=True, **options):
        handle = start(x, *args, **options)
        meanwhile = jax.tree.map(
            lambda leaf: jnp.sin(leaf) if leaf.dtype == jnp.float32 else leaf == leaf, x
        )
        return handle.done(after=meanwhile if after else None)

    return call


class ByHalves:
    """The names of jax.lax, each as a start and a done."""

    ppermute = staticmethod(between(jaxcomm.ppermute_start))
    psum = staticmethod(between(jaxcomm.psum_start))
    all_gather = staticmethod(between(jaxcomm.all_gather_start))
    psum_scatter = staticmethod(between(jaxcomm.psum_scatter_start))
    all_to_all = staticmethod(between(jaxcomm.all_to_all_start))


@pytest.fixture(scope="session")
def by_halves():
    """A library like jax.lax, whose calls are a start, a computation and a done."""
    return ByHalves


@pytest.fixture
def mesh(mesh_of):
    """Four devices along "i"."""
    return mesh_of((4,), ("i",))
