"""Whether every collective gives over NCCL what it gives over XLA's own."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

DTYPES = (
    "float32", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "uint32",
    "bool", "complex64", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def calls(size: int):
    """Returns collectives of x by name; x is (4 size, 8 size, 3) on each device."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]

    def at(backend):
        at = {"axis_name": "i", "backend": backend}
        return {
            "psum": lambda x: jaxcomm.psum(x, **at),
            "pmean": lambda x: jaxcomm.pmean(x, **at),
            "pmax": lambda x: jaxcomm.pmax(x, **at),
            "pmin": lambda x: jaxcomm.pmin(x, **at),
            "pprod": lambda x: jaxcomm.pprod(x, **at),
            "ppermute": lambda x: jaxcomm.ppermute(x, perm=ring, **at),
            "ppermute, one pair": lambda x: jaxcomm.ppermute(
                x, perm=[(0, size - 1)], **at
            ),
            "all_gather": lambda x: jaxcomm.all_gather(x, **at),
            "all_gather, axis 1": lambda x: jaxcomm.all_gather(
                x, axis=1, tiled=True, **at
            ),
            "psum_scatter": lambda x: jaxcomm.psum_scatter(
                x, scatter_dimension=1, tiled=True, **at
            ),
            "all_to_all": lambda x: jaxcomm.all_to_all(
                x, split_axis=0, concat_axis=1, tiled=True, **at
            ),
            "broadcast": lambda x: jaxcomm.broadcast(x, root=size - 1, **at),
            "reduce": lambda x: jaxcomm.reduce(x, root=size - 1, **at),
            "gather": lambda x: jaxcomm.gather(x, root=size - 1, **at),
            "scatter": lambda x: jaxcomm.scatter(
                x.reshape(size, -1), root=size - 1, **at
            ),
            "scan": lambda x: jaxcomm.scan(x, **at),
            "barrier": lambda x: jaxcomm.barrier(x, **at),
            "two leaves": lambda x: jaxcomm.psum([x, x], **at)[1],
            "in halves": lambda x: jaxcomm.ring_shift_done(
                jaxcomm.ring_shift_start(x, **at)
            ),
        }

    return at("nccl"), at("xla")


def failures(mesh) -> Iterator[str]:
    """Yields what differs, for every collective and dtype."""
    size = mesh.size
    split = jax.P("i")
    ours, theirs = calls(size)

    def run(function, x):
        program = jax.shard_map(
            function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
        )
        return np.asarray(jax.jit(program)(x))

    for dtype in DTYPES:
        x = jax.device_put(_values(dtype, size), jax.NamedSharding(mesh, split))
        for name, function in ours.items():
            try:
                found = run(function, x)
            except Exception as error:
                yield f"{name} of {dtype}: {str(error)[:200]}"
                continue
            expected = run(theirs[name], x)
            wide = [np.asarray(y).astype(np.complex128) for y in (found, expected)]
            tolerance = _tolerance(dtype)
            if found.dtype != expected.dtype or not np.allclose(
                *wide, rtol=tolerance, atol=tolerance * 8, equal_nan=True
            ):
                yield f"{name} of {dtype}: other values than XLA's"


def _tolerance(dtype):
    # XLA adds in another order, and narrow floats in their own type.
    if dtype.startswith("float8"):
        return 0.25
    return {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-6, "complex64": 1e-6}.get(
        dtype, 0.0
    )


def _values(dtype, size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(size * 4 * size, 8 * size, 3))
    if dtype == "bool":
        return x > 0
    if dtype == "complex64":
        return (x + 1j * generator.normal(size=x.shape)).astype(dtype)
    if "int" in dtype:
        return (np.abs(x) * 4).astype(dtype)
    return np.asarray(jnp.asarray(x, dtype))
