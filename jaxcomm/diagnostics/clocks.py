"""How far the clocks of hosts are apart, by collectives that end after all have come.

In such a collective no rank ends before another begins. If the times of two hosts say
that one did, a clock is wrong, and the same collectives say between what bounds the
error is. The idea is that of F. Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989: a message is never received before it was sent.
"""

import math
from collections.abc import Mapping, Sequence

from jaxcomm.diagnostics.alignment import Group, meetings
from jaxcomm.diagnostics.record import COMPLETED, ProcessRecord

# No rank has its result before every other has handed in its operand.
_ALL_WAIT = {"all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter"}


def corrections(
    records: Mapping[int, ProcessRecord], groups: Sequence[Group]
) -> dict[str, float]:
    """Return what to add to the times of each host, in seconds.

    It is 0 for the host of the first process, for hosts whose times contradict nothing,
    and for hosts that no such collective joins with the first. Else it is the middle of
    what is possible.

    Args:
      records: by process.
      groups: the groups of their communicators.
    """
    first, *others = dict.fromkeys(record.host for record in records.values())
    found = {first: 0.0}
    slack = _slack(records, groups) if others else {}
    while reachable := [
        (slack[known, host] + slack[host, known], known, host)
        for known, host in slack
        if known in found and host not in found and (host, known) in slack
    ]:
        # By way of the pair of hosts that leaves the least room.
        _, known, host = min(reachable)
        found[host] = found[known] + _between(-slack[host, known], slack[known, host])
    return {host: found.get(host, 0.0) for host in (first, *others)}


def _between(least: float, most: float) -> float:
    return 0.0 if least <= 0 <= most else (least + most) / 2


def _slack(records, groups) -> dict[tuple[str, str], float]:
    """Return how much later the clock of the second host may be set, at most."""
    slack: dict[tuple[str, str], float] = {}
    for group in groups:
        for met in meetings(group).values():
            if any(entry.collective not in _ALL_WAIT for entry in met.values()):
                continue
            began: dict[str, float] = {}
            ended: dict[str, float] = {}
            for rank, entry in met.items():
                process = group.process_of[rank]
                if process is None or entry.ended is None or entry.state != COMPLETED:
                    continue
                host = records[process].host
                began[host] = max(began.get(host, -math.inf), entry.started)
                ended[host] = min(ended.get(host, math.inf), entry.ended)
            # All pairs of hosts would be many; pairs with one of them join all.
            star = min(began, default="")
            for host in began.keys() - {star}:
                for one, other in ((star, host), (host, star)):
                    room = ended[one] - began[other]
                    slack[one, other] = min(slack.get((one, other), math.inf), room)
    return slack
