"""Dtypes between two ranks, by NCCL or around it; tests/collectives has all of them."""

import catalogue
import jax
import jax.numpy as jnp
import models
import pytest

import jaxcomm

pytestmark = pytest.mark.usefixtures("stand_in")
DTYPES = "float16", "bfloat16", "float8_e8m0fnu", "bool", "uint16", "float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reduces_and_travels(make_mesh, dtype):
    """C16, between two: there the sums of 16-bit floats are NCCL's own."""
    size = 2
    mesh = make_mesh(i=size)
    with jax.enable_x64(True):
        x = models.random_values(jnp.dtype(dtype), (size, size, 5), 3)
        choice = catalogue.fixed(size)
        cases = {
            name: case
            for name, case in catalogue.KINDS.items()
            if case.kind != "mean"
            # It has no zero, for the ranks that get nothing.
            and not (dtype == "float8_e8m0fnu" and case.target == "reduce")
        }
        # -0 and 0 are one maximum.
        is_wide = jnp.dtype(dtype).kind in "fc" and jnp.dtype(dtype).itemsize > 2
        found = models.run_stacked(
            mesh, lambda x: {n: c(jaxcomm, x, "i", choice) for n, c in cases.items()}, x
        )
        for name, case in cases.items():
            expected = models.apply_by_group(mesh, ("i",), case.model(choice), x)
            if is_wide or dtype.startswith("float4"):
                models.assert_near(found[name], expected, 1e-6, name, 1e-6)
            else:
                models.assert_identical(found[name], expected, name)
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
