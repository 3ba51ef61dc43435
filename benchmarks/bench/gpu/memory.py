"""What communicators cost on a device."""

from collections.abc import Iterator

import jax

import jaxcomm
from bench import units
from bench.gpu import device_memory
from bench.gpu.rows import Finding
from bench.gpu.timer import Timer

COUNTS = 1, 2, 4, 8


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields bytes of one device for communicators that share and that do not.

    The communicators are lanes over the same axis. Then what hops take after that.
    """
    # What the first of a process takes beside, such as kernels, is none of theirs.
    jaxcomm.init(timer.mesh, "i")
    for shares in (True, False):
        for count in COUNTS:
            jaxcomm.finalize()
            policy = jaxcomm.CommPolicy(share=shares, lanes=count)
            lanes = [f"lane {n}" for n in range(count)]
            jaxcomm.init(timer.mesh, "i", lanes=lanes, policy=policy)
            report = jaxcomm.memory_report()
            here = len(timer.mesh.local_devices)
            each = sum(row.device_bytes for row in report) / here / count
            parent = report[0].parent_bytes / here
            arena = report[0].arena_bytes / here
            planned = _planned(timer, lanes, policy)
            kind = "sharing" if shares else "with resources of their own"
            yield timer.finding(
                f"lanes {kind}, {count} of them, on a device",
                f"{units.size(int(each))} each, {units.size(int(parent))} the mesh's, "
                f"{units.size(int(arena))} the arena; jaxcomm.plan says "
                f"{units.size(planned)} in all",
                each_bytes=each,
                parent_bytes=parent,
                arena_bytes=arena,
                planned_bytes=planned,
            )
    yield from _hops(timer)


def _planned(timer, lanes, policy) -> int:
    plan = jaxcomm.plan(timer.mesh, lanes=lanes, policy=policy, backend="nccl")
    return plan.device_bytes


def _hops(timer):
    """The first hop to each peer connects to it; the next ones take nothing."""
    jaxcomm.finalize()
    jaxcomm.init(timer.mesh, "i")
    x = timer.random((timer.size, 1024))
    hops = [
        timer.program(lambda x, shift=shift: jaxcomm.ring_shift(x, "i", shift))
        for shift in range(1, timer.size)
    ]
    for text in "first hops", "next hops":
        before = device_memory.left_bytes()
        for hop in hops:
            jax.block_until_ready(hop(x))
        timer.agree(None)
        taken = before - device_memory.left_bytes()
        yield timer.finding(
            f"{text} to each of {len(hops)} peers, on all devices here",
            f"{units.size(max(0, taken))} taken",
            None if text == "first hops" else taken <= 0,
            taken_bytes=taken,
        )
