"""Once warm, nothing is allocated."""

import collections
from collections.abc import Iterator

import jax
from stand_in import StandIn

from bench.gpu import device_memory
from bench.gpu.rows import Finding
from bench.gpu.timer import Timer
from gpu_acceptance import checks
from jaxcomm.communicator.backends.nccl import library

# What a call must not ask of NCCL and CUDA.
_FORBIDDEN = {
    "cuMemAlloc_v2", "cuMemFree_v2", "ncclMemAlloc", "ncclMemFree", "cuEventCreate",
    "cuEventDestroy_v2", "cuStreamCreateWithPriority", "cuStreamDestroy_v2",
    "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommRegister",
    "ncclCommWindowRegister", "ncclCommDestroy", "cuStreamSynchronize",
    "cuCtxSynchronize",
}  # fmt: skip


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields what calls of every collective took."""
    checks.init(timer)
    x = timer.random((timer.size * timer.size, 32 * timer.size, 3))
    ours, _ = checks.calls(timer.size)
    programs = {name: timer.program(call) for name, call in ours.items()}
    for program in programs.values():
        for _ in range(3):
            jax.block_until_ready(program(x))
    found = library.load()
    stand_in = StandIn() if getattr(found, "is_stand_in", False) else None
    if stand_in:
        stand_in.clear()
    held = device_memory.communicators_bytes()
    first = device_memory.left_bytes()
    changes = {}
    for name, program in programs.items():
        before = device_memory.left_bytes()
        for _ in range(timer.sizes.steady):
            jax.block_until_ready(program(x))
        if change := before - device_memory.left_bytes():
            changes[name] = change
    taken = first - device_memory.left_bytes()
    grown = device_memory.communicators_bytes() - held
    by = f", by {changes}" if changes else ""
    yield timer.finding(
        f"device memory after {timer.sizes.steady} calls of each of {len(programs)} "
        "collectives",
        f"{taken} B less left by all but JAX's pool{by}; communicators hold "
        f"{grown} B more",
        not changes and grown == 0,
        taken_bytes=taken,
        grown_bytes=grown,
    )
    if stand_in:
        used = collections.Counter(call["name"] for call in stand_in.trace())
        found = {name: used[name] for name in _FORBIDDEN & set(used)}
        yield timer.finding(
            "calls of NCCL and CUDA that allocate or wait, meanwhile",
            f"{found or 'none'}, of {sum(used.values())}",
            bool(used["ncclAllReduce"]) and not found,
        )
