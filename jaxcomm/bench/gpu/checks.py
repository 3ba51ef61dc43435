"""Whether every collective gives over NCCL what it gives over XLA's own."""

import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.bench.gpu.rows import Finding
from jaxcomm.bench.gpu.timer import Timer, local

_MOST_TOLD = 8
# A lane whose small sums go by no kernel of ours.
_BY_NCCL = "nccl"
# NCCL's own, or the stand-in's.
_LIBRARY = re.compile(r"/lib\w*nccl\.so")


def calls(size: int):
    """Returns collectives of x by name; x is (4 size, 8 size, 3) on each device."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    by_nccl = {"lane": _BY_NCCL}

    def at(backend):
        at = {"axis_name": "i", "backend": backend}
        return {
            "psum": lambda x: jaxcomm.psum(x, **at),
            "pmean": lambda x: jaxcomm.pmean(x, **at),
            "psum, by NCCL": lambda x: jaxcomm.psum(x, **at, **by_nccl),
            "pmean, by NCCL": lambda x: jaxcomm.pmean(x, **at, **by_nccl),
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


def init(timer: Timer) -> None:
    """Makes the communicators that the calls use."""
    jaxcomm.init(timer.mesh, "i")
    policy = jaxcomm.CommPolicy(one_shot=False)
    jaxcomm.init(timer.mesh, "i", lanes=_BY_NCCL, policy=policy)


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields whether all are right, and which libnccl did it."""
    init(timer)
    dtypes = timer.sizes.dtypes
    wrong = list(_failures(timer, dtypes))
    total = len(dtypes) * len(calls(timer.size)[0])
    told = wrong[:_MOST_TOLD]
    if len(wrong) > len(told):
        told.append(f"and {len(wrong) - len(told)} more")
    yield timer.finding(
        "collectives and types right",
        "; ".join([f"{total - len(wrong)} of {total}", *told]),
        not wrong,
        right=total - len(wrong),
        total=total,
    )
    loaded = _libraries()
    yield timer.finding("libnccl in this process", ", ".join(loaded), len(loaded) == 1)


def _failures(timer, dtypes):
    """Yields what differs, for every collective and dtype."""
    ours, theirs = calls(timer.size)
    for dtype in dtypes:
        x = timer.spread(_values(dtype, timer.size))
        for name, function in ours.items():
            try:
                found = local(timer.program(function)(x))
            except Exception as error:
                yield f"{name} of {dtype}: {str(error)[:200]}"
                continue
            expected = local(timer.program(theirs[name])(x))
            wide = [np.asarray(y).astype(np.complex128) for y in (found, expected)]
            tolerance = _tolerance(dtype)
            if found.dtype != expected.dtype or not np.allclose(
                *wide, rtol=tolerance, atol=tolerance * 8, equal_nan=True
            ):
                yield f"{name} of {dtype}: other values than XLA's"


def _libraries():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if _LIBRARY.search(line)}
    return sorted(paths)


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
