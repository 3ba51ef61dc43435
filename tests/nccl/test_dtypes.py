"""Dtypes between two ranks, by NCCL or around it; tests/collectives has all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.usefixtures("stand_in")
DTYPES = "float16", "bfloat16", "float8_e8m0fnu", "bool", "uint16", "float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reduces_and_travels(models, make_mesh, dtype):
    """C16, between two: there the sums of 16-bit floats are NCCL's own."""
    size = 2
    mesh = make_mesh(i=size)
    with jax.enable_x64(True):
        x = models.random_values(jnp.dtype(dtype), (size, size, 5), 3)
        calls = {
            "psum": (lambda x: jaxcomm.psum(x, "i"), models.all_reduce("sum")),
            "pprod": (lambda x: jaxcomm.pprod(x, "i"), models.all_reduce("prod")),
            "pmax": (lambda x: jaxcomm.pmax(x, "i"), models.all_reduce("max")),
            "pmin": (lambda x: jaxcomm.pmin(x, "i"), models.all_reduce("min")),
            "psum_scatter": (
                lambda x: jaxcomm.psum_scatter(x, "i"),
                models.reduce_scatter(),
            ),
            "reduce": (
                lambda x: jaxcomm.preduce(x, "i", 1, op="max"),
                models.only_on(1, models.all_reduce("max")),
            ),
            "scan": (
                lambda x: jaxcomm.pscan(x, "i", op="min", exclusive=True),
                models.scan("min", exclusive=True),
            ),
            "all_gather": (lambda x: jaxcomm.all_gather(x, "i"), models.all_gather()),
            "ring_shift": (
                lambda x: jaxcomm.ring_shift(x, "i"),
                models.permute([(r, (r + 1) % size) for r in range(size)]),
            ),
        }
        counts = dtype == "bool"
        if dtype == "float8_e8m0fnu":
            del calls["reduce"]  # it has no zero, for the ranks that get nothing
        # -0 and 0 are one maximum.
        is_wide = jnp.dtype(dtype).kind in "fc" and jnp.dtype(dtype).itemsize > 2
        found = models.run_stacked(
            mesh, lambda x: {name: call(x) for name, (call, _) in calls.items()}, x
        )
        for name, (_, model) in calls.items():
            of = (
                x.astype(np.int32)
                if counts and name in ("psum", "pprod", "psum_scatter")
                else x
            )
            expected = models.apply_by_group(mesh, ("i",), model, of)
            if is_wide or dtype.startswith("float4"):
                models.assert_near(found[name], expected, 1e-6, name, 1e-6)
            else:
                models.assert_identical(found[name], expected, name)
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
