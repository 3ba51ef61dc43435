"""Whether every collective gives over NCCL what it gives over XLA's own."""

import os
import re
from collections.abc import Iterator
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from bench.gpu.rows import Finding
from bench.gpu.timer import Timer, local

_MOST_TOLD = 8
# Lanes: whose small sums go by no kernel of ours, and which XLA records in graphs.
_BY_NCCL = "nccl"
_RECORDED = "recorded"
_POLICIES = {
    _BY_NCCL: jaxcomm.CommPolicy(lanes=3, one_shot=False),
    _RECORDED: jaxcomm.CommPolicy(lanes=3, command_buffers=True),
}
_X64 = "float64", "int64", "uint64", "complex128"
# NCCL's own, or the stand-in's.
_LIBRARY = re.compile(r"/lib\w*nccl\.so")


def calls(size: int):
    """Return collectives of x by name; x is (size, 32 size, 3) on each device."""
    choice = catalogue.fixed(size)
    backwards = {"axis_index_groups": [list(range(size))[::-1]]}
    cases = [
        *((name, case, jaxcomm, {}) for name, case in catalogue.CASES.items()),
        *(
            (f"{name}, split-phase", case, catalogue.SPLIT_PHASE, {})
            for name, case in catalogue.FUNCTIONS.items()
            if case.starts
        ),
        *(
            (f"{name}, by NCCL", catalogue.CASES[name], jaxcomm, {"lane": _BY_NCCL})
            for name in ("psum", "pmean")
        ),
        ("in groups", catalogue.CASES["all_gather"], jaxcomm, backwards),
    ]

    def at(backend):
        def bound(case, lib, options):
            return lambda x: case(lib, x, "i", choice, backend=backend, **options)

        of = {name: bound(case, lib, options) for name, case, lib, options in cases}
        two = of["psum"]
        return of | {"two leaves": lambda x: two([x, x])[1]}

    return at("nccl"), at("xla")


def on_gpus(size: int):
    """Returns such calls that need a GPU's streams, or its graphs."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]

    def at(backend):
        at: dict[str, Any] = {"axis_name": "i", "backend": backend}
        recorded: dict[str, Any] = at | {"lane": _RECORDED}

        def beside_native(x):
            """Three at a time: two lanes of ours and XLA's own."""
            arriving = jaxcomm.ppermute_start(x, perm=ring, lane=_BY_NCCL, **at)
            native = arriving.then(x)
            if _is_narrow(x.dtype.name):  # XLA does not send all of them
                native = jax.lax.bitcast_convert_type(native, "uint8")
            native = jax.lax.ppermute(native, "i", ring)
            if _is_narrow(x.dtype.name):
                native = jax.lax.bitcast_convert_type(native, x.dtype)
            own = jaxcomm.ppermute(x, perm=ring[::-1], **at)
            return jnp.stack([native, own, arriving.done()])

        def several(x):
            # Nothing here was among what made the communicator ready.
            x = jaxcomm.all_to_all(
                x, split_axis=0, concat_axis=0, tiled=True, **recorded
            )
            x = jaxcomm.ppermute(x, perm=[(b, a) for a, b in ring], **recorded)
            last = jaxcomm.pbroadcast(x, source=size - 1, **recorded)
            return jaxcomm.all_gather(jnp.stack([x, last]), **recorded)

        return {"beside XLA's own": beside_native, "several, recorded": several}

    return at("nccl"), at("xla")


def init(timer: Timer) -> None:
    """Makes the communicators that the calls use."""
    jaxcomm.init(timer.mesh, "i")
    for lane, policy in _POLICIES.items():
        jaxcomm.init(timer.mesh, "i", lanes=lane, policy=policy)


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields whether all are right, and which libnccl did it."""
    init(timer)
    dtypes = timer.sizes.dtypes
    wrong = list(_failures(timer, dtypes))
    total = len(dtypes) * len(_calls(timer)[0])
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
    # Where one is preloaded, JAX opens its own, too, and everybody calls that one.
    is_preloaded = any(path in os.environ.get("LD_PRELOAD", "") for path in loaded)
    is_one = len(loaded) == 1 or is_preloaded
    yield timer.finding("libnccl in this process", ", ".join(loaded), is_one)


def _calls(timer):
    """Returns ours and XLA's, all that the devices can do."""
    ours, theirs = calls(timer.size)
    if not _is_cpu(timer):
        more, more_of_theirs = on_gpus(timer.size)
        ours, theirs = ours | more, theirs | more_of_theirs
    return ours, theirs


def _failures(timer, dtypes):
    """Yields what differs, for every collective and dtype."""
    ours, theirs = _calls(timer)
    for dtype in dtypes:
        with jax.enable_x64(dtype in _X64):
            x = timer.spread(_values(dtype, timer.size))
            results = _results(timer, ours, x)
            is_narrow = _is_narrow(dtype)
            expected = _results(timer, theirs, x.astype("float32") if is_narrow else x)
        for name, found in results.items():
            if isinstance(found, Exception):
                yield f"{name} of {dtype}: {str(found)[:200]}"
                continue
            right = expected[name]
            if isinstance(right, Exception):
                yield f"{name} of {dtype}, XLA's own: {str(right)[:200]}"
                continue
            if is_narrow:
                right = _narrowed(right, dtype)
            wide = [np.asarray(y).astype(np.complex128) for y in (found, right)]
            tolerance = _tolerance(dtype)
            if found.dtype != right.dtype or not np.allclose(
                *wide, rtol=tolerance, atol=tolerance * 8, equal_nan=True
            ):
                yield f"{name} of {dtype}: other values than XLA's"


def _is_narrow(dtype):
    """Whether XLA reduces it in its own type, if at all."""
    return dtype.startswith("float8")


def _narrowed(wide, dtype):
    """Returns what was computed in float32 as another type.

    Infinity, which ``pscan`` gives where nothing is before a rank, is the extreme of a
    type without it.
    """
    if np.isnan(np.float32(np.inf).astype(dtype)):
        info = jnp.finfo(dtype)
        wide = np.nan_to_num(wide, nan=np.nan, posinf=info.max, neginf=info.min)
    return wide.astype(dtype)


def _results(timer, functions, x):
    """Returns what each gives of x, or how it fails."""
    if not _is_cpu(timer):
        # All in one program, which takes less time to compile.
        try:
            return _twice(timer, functions, x)
        except Exception:
            pass  # one of them
    results = {}
    for name, function in functions.items():
        try:
            results |= _twice(timer, {name: function}, x)
        except Exception as error:
            results[name] = error
    return results


def _twice(timer, functions, x):
    """Returns the results of a second call: XLA may have recorded the first."""

    def all_of_them(x):
        return {name: function(x) for name, function in functions.items()}

    program = timer.program(all_of_them)
    jax.block_until_ready(program(x))
    return {name: local(result) for name, result in program(x).items()}


def _is_cpu(timer):
    return timer.mesh.devices.flat[0].platform == "cpu"


def _libraries():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if _LIBRARY.search(line)}
    return sorted(paths)


def _tolerance(dtype):
    # XLA adds in another order, and narrow floats in their own type.
    if dtype.startswith("float8"):
        return 0.25
    return {
        "bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-6, "complex64": 1e-6,
        "float64": 1e-14, "complex128": 1e-14,
    }.get(dtype, 0.0)  # fmt: skip


def _values(dtype, size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(size * size, 32 * size, 3))
    if dtype == "bool":
        return x > 0
    if "complex" in dtype:
        return (x + 1j * generator.normal(size=x.shape)).astype(dtype)
    if "int" in dtype:
        return (np.abs(x) * 4).astype(dtype)
    return np.asarray(jnp.asarray(x, dtype))
