"""How long NCCL takes, by the model with which NCCL itself chooses an algorithm.

Source: src/graph/tuning.cc of NCCL 2.30.7. ``time = latency + bytes / bandwidth``, the
least over rings and trees and over three protocols. NCCL's numbers for NVLink and
networks are below, in microseconds. Trees are corrected for medium sizes there, by a
table that is left out here: a tree wins below it.
"""

import math

from jaxcomm.machine import Machine
from jaxcomm.planning.closed_forms import Form
from jaxcomm.planning.groups import GroupClass

# By protocol: LL, LL128, Simple.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_NVLINK = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
_NETWORK = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
# Of the bandwidth: LL sends a flag with each word, LL128 with each line.
_SHARE = (0.5, 0.92, 1.0)
_TREE_SHARE = 0.92


def ring_rate(group: GroupClass, machine: Machine) -> float:
    """Return the bytes per second of NCCL's rings through a group.

    Every ring leaves a domain once. There are as many rings as ranks of the group in a
    domain, and each goes by a network card of its own.
    """
    if group.domains == 1:
        return machine.bytes_per_second
    across = group.per_domain * machine.network_bytes_per_second
    return min(across, machine.bytes_per_second)


def seconds(collective: str, form: Form, group: GroupClass, machine: Machine) -> float:
    """Return the time of a collective by NCCL.

    Args:
      collective: of the C++ planner.
      form: its closed form.
      group: whose ranks take part.
      machine: whose links they have.
    """
    if not form.by_ring:
        return _pairs(form, group, machine)
    rate = ring_rate(group, machine)
    times = [
        _ring_latency(collective, form, group, protocol) + form.bytes / (rate * share)
        for protocol, share in enumerate(_SHARE)
    ]
    if collective == "all_reduce":
        # Twice up and down the tree: the same bytes as the ring's for many ranks.
        times += [
            _tree_latency(group, protocol) + form.bytes / (rate * share * _TREE_SHARE)
            for protocol, share in enumerate(_SHARE)
        ]
    return min(times)


def _ring_latency(collective, form, group, protocol):
    crossings = 0
    if group.domains > 1:
        rounds = 2 if collective == "all_reduce" else 1
        crossings = rounds * (group.domains - 1)
    within = max(form.steps - crossings, 0)
    return 1e-6 * (
        _BASE["ring"][protocol]
        + within * _NVLINK["ring"][protocol]
        + crossings * _NETWORK["ring"][protocol]
    )


def _tree_latency(group, protocol):
    within = math.ceil(group.size / group.domains) - 1
    return 1e-6 * (
        _BASE["tree"][protocol]
        + 2 * within * _NVLINK["tree"][protocol]
        + 2 * math.log2(group.domains) * _NETWORK["tree"][protocol]
    )


def _pairs(form: Form, group: GroupClass, machine: Machine) -> float:
    """Sends from rank to rank: those within a domain beside those between domains."""
    if group.domains == 1:
        latency = machine.latency + (form.steps - 1) * 1e-6 * _NVLINK["ring"][0]
        return latency + form.bytes / machine.bytes_per_second
    latency = machine.network_latency + (form.steps - 1) * 1e-6 * _NETWORK["ring"][0]
    # A neighbor may be in another domain; of several peers a share is.
    outside = 1.0
    if form.steps > 1:
        outside = (group.size - group.largest) / (group.size - 1)
    across = outside * form.bytes / machine.network_bytes_per_second
    within = (1 - outside) * form.bytes / machine.bytes_per_second
    return latency + max(across, within)
