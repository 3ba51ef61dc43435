"""Every collective, every dtype, every number of processes, against numpy."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

DTYPES = {
    "plain": [
        "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32",
        "bfloat16", "float16", "float32", "complex64",
    ],
    "float8": sorted(name for name in dir(jnp) if name.startswith("float8")),
    "x64": ["int64", "uint64", "float64", "complex128"],
    # They travel as int8: the transport sees no new type, and XLA compiles for long.
    "narrow": ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"],
}  # fmt: skip
# These may be added in another order than the ranks': those of one process first.
REORDERED = {"complex64": 1e-5, "complex128": 1e-13, "float32": 1e-6, "float64": 1e-14}


def collectives_of_every_dtype(here, mesh, family):
    size = mesh.size
    x = {
        name: here.values(jnp.dtype(name), (size, size, 2), seed)
        for seed, name in enumerate(DTYPES[family])
    }
    with jax.enable_x64(True) if family == "x64" else contextlib.nullcontext():
        found = here.run(mesh, lambda x: here.every(x, "i", size, by_type=True), x)
    for name, (case, group_model) in here.models(size).items():
        for dtype, leaf in case.of_types(x).items():
            what = f"{name} of {dtype}"
            expected = here.by_group(mesh, ("i",), group_model, leaf)
            rows = here.rows(mesh)
            if case.kind == "sum" and case.target != "scan" and dtype in REORDERED:
                terms = here.by_group(mesh, ("i",), group_model, np.abs(leaf))[rows]
                result, expected = found[name][dtype], expected[rows]
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
                # Each of at most size - 1 additions errs by half an ulp of at most the
                # sum of the magnitudes, here and in the model.
                bound = size * float(jnp.finfo(result.dtype).eps) * np.abs(terms)
                assert (np.abs(result - expected) <= bound).all(), what
            elif case.kind == "product" and dtype in REORDERED:
                # Complex products may use fused multiply-adds, besides.
                near = REORDERED[dtype]
                np.testing.assert_allclose(
                    found[name][dtype], expected[rows], near, near, err_msg=what
                )
            else:
                here.identical(mesh, found[name][dtype], expected, what)
    (member,) = jaxcomm.communicators()
    assert member.transport == "shared memory"


CASES = [((3, 2), "plain"), ((2, 1), "x64"), ((3, 1), "narrow")]
MORE = [
    pytest.param((processes, devices), family, marks=pytest.mark.thorough)
    for processes in (2, 3, 4)
    for devices in (1, 2)
    for family in ("plain", "float8", "x64")
    if ((processes, devices), family) not in CASES
]


@pytest.mark.parametrize(("at", "family"), [*CASES, *MORE])
def test_every_collective_is_its_model_in_every_dtype(team, at, family):
    team.call(collectives_of_every_dtype, at, family=family)
