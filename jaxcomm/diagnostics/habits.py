"""Who does something else than before, where ranks do different things.

Of two ranks that disagree, neither is in the minority. But programs repeat themselves:
what has always come next tells which of them strayed.
"""

from collections.abc import Mapping, Sequence

from jaxcomm.diagnostics.alignment import Group
from jaxcomm.diagnostics.record import Entry

# Fewer are no habit.
_LEAST_TIMES = 3
_LONGEST = 32


def expected_after(before: Sequence[str]) -> tuple[str, int]:
    """Return what has always come next, and how often; empty if that is not known.

    Args:
      before: operations, the oldest first. The most that the last ones have in common
        with earlier places counts.
    """
    for length in range(min(_LONGEST, len(before)), 0, -1):
        last = before[len(before) - length :]
        found = [
            before[i]
            for i in range(length, len(before))
            if before[i - length : i] == last
        ]
        if len(found) >= _LEAST_TIMES:
            return (found[0], len(found)) if len({*found}) == 1 else ("", 0)
    return "", 0


def broken_by(
    group: Group, parties: Sequence[Mapping[int, Entry]]
) -> tuple[list[int], str]:
    """Return the ranks that broke a habit that others kept, and what was to come.

    Args:
      group: of ranks that do different things.
      parties: what ranks do, those together that agree.
    """
    broke, kept, expected = [], [], ""
    for party in parties:
        for rank, entry in party.items():
            before = [
                each.operation
                for each in group.entries[rank]
                if each.sequence < entry.sequence
            ]
            next_, times = expected_after(before)
            if not next_:
                return [], ""
            if next_ == entry.operation:
                kept.append(rank)
                expected = f"{next_} came next {times} times before"
            else:
                broke.append(rank)
    return (sorted(broke), expected) if kept else ([], "")
