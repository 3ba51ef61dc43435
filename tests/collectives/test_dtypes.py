"""Every dtype through every collective, all dtypes in one call."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

FLOAT8 = sorted(name for name in dir(jnp) if name.startswith("float8"))
NARROW = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
PLAIN = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32",
    "bfloat16", "float16", "float32", "complex64", *FLOAT8,
]  # fmt: skip
X64 = ["int64", "uint64", "float64", "complex128"]
EVERY = [*PLAIN, *NARROW, *X64]
# Over NCCL types of a size travel alike, and XLA computes in the narrow ones.
OF_NCCL = [
    "bool", "int8", "uint16", "int32", "uint64", "bfloat16", "float16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "int4", "float4_e2m1fn",
]  # fmt: skip
on_host = pytest.mark.host_only(reason="names its backends, or is of the arguments")


@pytest.fixture
def operands(values):
    def make(names, shape):
        return {
            name: values(jnp.dtype(name), shape, seed)
            for seed, name in enumerate(names)
        }

    return make


SIZE = 4
CHOICE = catalogue.fixed(SIZE)
MOVING = {n: c for n, c in catalogue.KINDS.items() if c.kind == "move"}
# Each operation, and each way to reduce; cases of one planner differ in what they send.
NAMES = (
    "psum", "pmax", "pmin", "pprod", "preduce", "psum_scatter", "pscan_back",
    "pscan_min",
)  # fmt: skip
REDUCING = {name: catalogue.CASES[name] for name in NAMES}
REDUCING["pscan_max"] = catalogue.scan_case(
    "pscan_max", "extreme", op="max", exclusive=True, reverse=True
)


def _all_of(cases, choice=CHOICE):
    return lambda x: {
        n: c(jaxcomm, c.of_types(x), "i", choice) for n, c in cases.items()
    }


def test_moving_changes_no_bit_of_any_dtype(
    stacked, by_group, identical, mesh, operands, default_backend
):
    x = operands(OF_NCCL if default_backend == "nccl" else EVERY, (SIZE, SIZE, 2))
    with jax.enable_x64(True):
        # A program of each: XLA takes longer for one of all of them.
        found = [stacked(mesh, _all_of({n: c}), x) for n, c in MOVING.items()]
        found = jax.tree.map(np.asarray, found)
    for of_one, (name, case) in zip(found, MOVING.items(), strict=True):
        for dtype, leaf in x.items():
            expected = by_group(mesh, ("i",), case.model(CHOICE), leaf)
            identical(of_one[name][dtype], expected, f"{name} of {dtype}")


def test_reductions_of_every_dtype_add_by_a_tree_and_round_once(
    stacked, by_group, identical, mesh_of, operands, as_users_compile, default_backend
):
    over_nccl = default_backend == "nccl"
    # The stand-in adds in rank order, which of three ranks is the tree.
    size = SIZE - over_nccl
    mesh, choice = mesh_of((size,), ("i",)), catalogue.fixed(size)
    x = operands(OF_NCCL if over_nccl else EVERY, (size, size, 2))
    if over_nccl:
        # Reduced by XLA on CPU, which takes its least number, 2**-127, for 0: a NaN.
        x.pop("float8_e8m0fnu", None)

    # Over NCCL it is XLA that rounds, which without its fusions makes NaN of small
    # negative numbers in three of the float8 types.
    options = as_users_compile if over_nccl else None
    with jax.enable_x64(True):
        found = [
            stacked(mesh, _all_of({n: c}, choice), x, options=options)
            for n, c in REDUCING.items()
        ]
        found = {n: jax.tree.map(np.asarray, each[n]) for each in found for n in each}
    # Complex products and sums of two may differ by the use of fused multiply-adds.
    fused = {"complex64": 1e-5, "complex128": 1e-13}
    for name, case in REDUCING.items():
        for dtype, leaf in case.of_types(x).items():
            expected = by_group(mesh, ("i",), case.model(choice), leaf)
            if dtype in fused and case.kind == "product":
                np.testing.assert_allclose(
                    found[name][dtype], expected, fused[dtype], fused[dtype]
                )
                continue
            if over_nccl and dtype == "float4_e2m1fn" and case.kind == "extreme":
                np.testing.assert_array_equal(found[name][dtype], expected)  # -0 is 0
                continue
            identical(found[name][dtype], expected, f"{name} of {dtype}")


@on_host
def test_xla_moves_and_reduces_every_dtype_as_the_host_does(
    stacked, identical, near, mesh, operands
):
    # XLA's own all-reduce refuses the narrow types.
    names = [name for name in PLAIN if name not in FLOAT8]
    x = operands([*names, "float8_e4m3fn", "float8_e5m2"], (4, 4, 2))
    without_zero = {
        "float8_e8m0fnu": jnp.exp2(jnp.arange(8.0)).astype("float8_e8m0fnu")
    }

    def program(backend):
        def run(x):
            at = {"backend": backend}
            real = {name: x[name] for name in x if name != "complex64"}
            return {
                "pmax": jaxcomm.pmax(real, "i", **at),
                "pmin of complex": jaxcomm.pmin(
                    {"complex64": x["complex64"]}, "i", **at
                ),
                "all_to_all": jaxcomm.all_to_all(x, "i", 0, 1, tiled=True, **at),
                "broadcast": jaxcomm.pbroadcast(x | without_zero, "i", 3, **at),
                "psum": jaxcomm.psum(x, "i", **at),
                "pprod": jaxcomm.pprod(x, "i", **at),
            }

        return run

    ours, xla = (stacked(mesh, program(backend), x) for backend in ("host", "xla"))
    for name, results in ours.items():
        for dtype, found in results.items():
            expected = xla[name][dtype]
            if name in ("psum", "pprod") and jnp.issubdtype(found.dtype, jnp.inexact):
                # The order of summation differs: one unit in the last place of the
                # result's type, 2**-2 for the coarsest float8, times cancellation.
                near(found, expected, 4 * float(jnp.finfo(found.dtype).eps), name, 1e-6)
            else:
                identical(found, expected, f"{name} of {dtype}")


def test_means_have_the_dtypes_of_their_twin(stacked, identical, mesh):
    names = ["int8", "int32", "uint16", "bool", "float32", "bfloat16", "complex64"]
    # Multiples of 4 that fit each type: exact means.
    rows = 4 * np.arange(8).reshape(4, 2)
    x = {name: rows.astype(jnp.dtype(name)) for name in names}
    ours = stacked(mesh, lambda x: jaxcomm.pmean(x, "i"), x)
    identical(ours, stacked(mesh, lambda x: jax.lax.pmean(x, "i"), x))


@on_host
def test_python_scalars_and_numpy_arrays_are_leaves(stacked, mesh):
    x, constant = np.arange(4, dtype=np.float32), np.arange(3, dtype=np.int16)

    def program(x):
        return (
            jaxcomm.all_gather((x, constant, 2), "i"),
            jaxcomm.psum((x, constant, 2, 1.5), "i"),
            jaxcomm.pmax((x, constant, 2), "i"),
            jaxcomm.ppermute((x, constant), "i", [(0, 1)]),
        )

    expected = (
        (x, [constant] * 4, [2] * 4),
        (6, 4 * constant, 8, 6.0),
        (3, constant, 2),
        (0, 0 * constant),
    )
    found = jax.tree.map(lambda leaf: np.asarray(leaf)[3], stacked(mesh, program, x))
    for results, wanted in zip(found, expected, strict=True):
        for one, other in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        assert results[1].dtype == np.int16
