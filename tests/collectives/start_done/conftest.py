"""Every collective that can be had in two halves, under the names of jax.lax."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomm


def between(start, done):
    """Returns the two halves with a computation between them, as one function."""

    def call(x, *args, after=True, **options):
        handle = start(x, *args, **options)
        meanwhile = jax.tree.map(
            lambda leaf: jnp.sin(leaf) if leaf.dtype == jnp.float32 else leaf == leaf, x
        )
        return done(handle, after=meanwhile if after else None)

    return call


class ByHalves:
    """The names of jax.lax, each as a start and a done."""

    ppermute = staticmethod(between(jaxcomm.ppermute_start, jaxcomm.ppermute_done))
    psum = staticmethod(between(jaxcomm.psum_start, jaxcomm.psum_done))
    all_gather = staticmethod(
        between(jaxcomm.all_gather_start, jaxcomm.all_gather_done)
    )
    psum_scatter = staticmethod(
        between(jaxcomm.psum_scatter_start, jaxcomm.psum_scatter_done)
    )
    all_to_all = staticmethod(
        between(jaxcomm.all_to_all_start, jaxcomm.all_to_all_done)
    )


@pytest.fixture(scope="session")
def by_halves():
    """A library like jax.lax, whose calls are a start, a computation and a done."""
    return ByHalves


@pytest.fixture
def mesh(mesh_of):
    """Four devices along "i"."""
    return mesh_of((4,), ("i",))
