"""What of NCCL every collective becomes; tests/collectives runs over NCCL, too."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.mark.parametrize("elements", [600_001, 1])
def test_sums_of_16_bit_floats_are_rounded_once(stand_in, make_mesh, elements):
    """Above 1 MiB in two phases, so that the wide sums do not travel."""
    mesh = make_mesh(i=4)
    x = np.ones((4, elements), jnp.bfloat16)
    # In bfloat16, 256 + 1 is 256; the sum is 259, and 260 is next to it.
    x[0] = 256
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x)
    models.assert_identical(found, np.full_like(x, 260))
    used = stand_in.trace("ncclAllReduce", "ncclAlltoAll", "ncclAllGather")
    used = [call for call in used if call["count"] > 4]
    if elements > 1:
        assert {call["name"] for call in used} == {"ncclAlltoAll", "ncclAllGather"}
    else:
        assert not used


def test_what_nccl_cannot_reduce_is_gathered_alone(stand_in, make_mesh):
    mesh = make_mesh(i=3)
    x = {
        name: models.random_values(jnp.dtype(name), (3, 5), 0)
        for name in ("complex64", "float32", "int16")
    }
    jaxcomm.init(mesh, "i")
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.pprod(x, "i"), x)
    for name, stack in x.items():
        exact = models.apply_by_group(mesh, ("i",), models.all_reduce("prod"), stack)
        models.assert_near(found[name], exact, 1e-5, name, 1e-5)
    gathered = stand_in.trace("ncclAllGather")
    assert [call["count"] for call in gathered] == [5 * 8] * 3
    reduced = stand_in.trace("ncclAllReduce")
    assert [call["count"] for call in reduced] == [5] * 6


def test_means_of_wide_floats_are_ncclavg(stand_in, make_mesh):
    mesh = make_mesh(i=3)
    x = jax.random.normal(jax.random.key(0), (6, 5))

    def means(x):
        return jaxcomm.pmean(x, "i"), jaxcomm.pmean(x.astype(jnp.bfloat16), "i")

    wide, narrow = models.over(mesh, means, out=jax.P())(x)
    exact = np.asarray(x, np.float64).reshape(3, 2, 5).mean(0)
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-7)
    narrow = narrow.astype(jnp.float32)
    np.testing.assert_allclose(narrow, exact, rtol=2e-2, atol=1e-2)
    # kSum and kAvg.
    assert {call["op"] for call in stand_in.trace("ncclAllReduce")} == {0, 4}


def test_what_is_gathered_instead_stays_within_its_groups(make_mesh):
    mesh, groups = make_mesh(i=4), [[2, 0], [1, 3]]
    x = models.random_values(jnp.dtype("complex64"), (4, 5), 0)
    found = models.run_stacked(
        mesh, lambda x: jaxcomm.pmax(x, "i", axis_index_groups=groups), x
    )
    models.assert_identical(
        found, models.apply_by_group(mesh, ("i",), models.all_reduce("max"), x, groups)
    )
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
