"""How long a collective takes, and what carries it."""

import dataclasses

from jaxcomm import _ffi
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.machine import Machine
from jaxcomm.planning import nccl_tuning, samples
from jaxcomm.planning.calls import Call, itemsize
from jaxcomm.planning.closed_forms import form, result_bytes, touched_bytes
from jaxcomm.planning.communicators import can_add
from jaxcomm.planning.figure import Figure
from jaxcomm.planning.groups import Devices, GroupClass

_WORD = 4
# What the kernel for small sums adds: ffi/backends/nccl/one_shot.cc.
_SUMS = {"float32", "complex64", "int32", "uint32"}
_HALF_SUMS = {"float16", "bfloat16"}
# glibc maps arrays of so many bytes anew each time (M_MMAP_THRESHOLD_MAX), and the
# kernel clears each page.
_MAPPED_BYTES = 32 << 20
# A line of the kernel holds a word and its flag.
_FLAGGED = 2


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one collective costs its slowest group.

    Attributes:
      seconds: from the arrival of the last rank to the end.
      carrier: what moves the bytes: an engine of NCCL's, ``"memory"``, ``"xla"`` ...
      reason: why that one.
      bus_rate: bytes per second as nccl-tests count them; 0 if nothing is sent.
      sent: bytes that the busiest rank sends.
    """

    seconds: Figure
    carrier: str
    reason: str
    bus_rate: float
    sent: float


def cost(call: Call, devices: Devices, machine: Machine, policy: CommPolicy) -> Cost:
    """Return what a call costs the group that takes longest."""
    groups = devices.groups(call.axes, call.index_groups)
    return max(
        (_of_group(call, each, devices, machine, policy) for each in groups),
        key=lambda found: found.seconds.value,
    )


def _of_group(call, group: GroupClass, devices, machine, policy) -> Cost:
    if group.size == 1:
        return Cost(Figure(0, "f"), "nothing", "a group of one", 0, 0)
    of = form(call.collective, group.size, call.bytes)
    if machine.platform == "cpu":
        transport, reason = _transport(call, group)
        carrier = transport
    else:
        transport = "nccl"
        carrier, reason = _engine(call, of, group, policy)
    # Groups that work on the same host at the same time, more than it has cores.
    at_once = devices.size / (group.size * devices.hosts)
    at_once = max(1.0, at_once / machine.cores) if machine.cores else 1.0

    def by_formula(size, at_once):
        of_size = dataclasses.replace(group, size=size)
        if transport == "nccl":
            return _on_gpus(call, carrier, of_size, machine)
        return _on_cpus(call, of_size, machine, at_once)

    figure = Figure(by_formula(group.size, at_once), "f")
    at = samples.nearest(machine, call.collective, transport, group.size)
    if transport != "nccl":
        at = _of_like_memory(at, call, group)
    if at:
        seconds, is_between = samples.interpolate(at, call.bytes)
        # What was measured was the only group of its host.
        ratio = figure.value / by_formula(at[0].ranks, 1)
        is_scaled = not is_between or abs(ratio - 1) > 1e-9
        figure = Figure(seconds * ratio, "s" if is_scaled else "m")
    return Cost(figure, carrier, reason, of.bytes / figure.value, of.bytes)


def _of_like_memory(at, call: Call, group: GroupClass) -> list:
    """Return the samples whose results come from the same kind of memory as a call's.

    All of them if none does.
    """
    here = result_bytes(call.collective, group.size, call.bytes) >= _MAPPED_BYTES
    like = [
        each
        for each in at
        if here
        == (result_bytes(call.collective, each.ranks, each.bytes) >= _MAPPED_BYTES)
    ]
    return like or at


def _transport(call: Call, group: GroupClass) -> tuple[str, str]:
    if call.backend == "xla":
        return "xla", "XLA's collective"
    within = "a process" if group.processes == 1 else "a host"
    return (
        "memory" if group.processes == 1 else "shared memory",
        f"the ranks of a group share {within}",
    )


def _on_cpus(call: Call, group: GroupClass, machine: Machine, at_once: float) -> float:
    if group.hosts > 1:
        of = form(call.collective, group.size, call.bytes)
        wire = of.bytes / machine.network_bytes_per_second
        return of.steps * machine.network_latency + wire
    touched = at_once * touched_bytes(call.collective, group.size, call.bytes)
    return machine.latency + touched / machine.memory_bytes_per_second


def _engine(call: Call, of, group: GroupClass, policy: CommPolicy) -> tuple[str, str]:
    """Return the engine that the nccl backend would choose, by its own rule."""
    if call.backend == "xla" or policy.source == "xla":
        return "xla", "XLA's collective"
    sums, words = _sums(call)
    return _ffi.choose_engine(
        size=group.size,
        only_moves=of.only_moves,
        moves_along_pairs=call.collective == "permute",
        bytes_sent=int(of.bytes),
        # A part for every rank, of every leaf; a permutation sends whole leaves.
        copies=len(call.leaves) * (1 if call.collective == "permute" else group.size),
        sums=sums,
        words_of_largest_sum=words,
        copy_engines=policy.uses_copy_engines,
        one_shot=policy.uses_one_shot,
        can_copy=group.processes == 1 and group.domains == 1,
        can_add=can_add(group),
    )


def _sums(call: Call) -> tuple[int, int]:
    """Return how many sums our kernel could add, and the words of the largest."""
    if call.collective != "all_reduce" or call.op not in ("sum", "mean"):
        return 0, 0
    words = []
    for shape, dtype in call.leaves:
        count = 1
        for extent in shape:
            count *= extent
        is_mean = call.op == "mean"
        adds = dtype == "float32" if is_mean else dtype in _SUMS | _HALF_SUMS
        if not adds or count == 0 or (dtype in _HALF_SUMS and count % 2):
            return 0, 0
        words.append(count * itemsize(dtype) // _WORD)
    return len(words), max(words, default=0)


def _on_gpus(call: Call, carrier: str, group: GroupClass, machine: Machine) -> float:
    of = form(call.collective, group.size, call.bytes)
    if carrier == "copy":
        return machine.latency + of.bytes / machine.bytes_per_second
    if carrier == "one_shot":
        # Every rank writes to all others at once, words and flags.
        sent = _FLAGGED * (group.size - 1) * call.bytes
        one_hop = dataclasses.replace(of, steps=1, bytes=sent)
        return nccl_tuning.seconds("one_shot", one_hop, group, machine)
    return nccl_tuning.seconds(call.collective, of, group, machine)
