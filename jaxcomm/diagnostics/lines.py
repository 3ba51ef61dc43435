"""Which collectives of which programs NCCL was asked for.

NCCL numbers collectives, and knows no program. But their order is that of programs: so
an automaton of all programs of a process follows the operations on record. An operation
gets the instructions that it can have been, given all others. If nothing fits, a
program is missing or not understood, and nothing is said.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxcomm.diagnostics.of_nccl import Place
from jaxcomm.diagnostics.programs import Call, Node, Program
from jaxcomm.diagnostics.ring import Ring

# More are not worth a line.
_MOST_NAMED = 3
# Where each may be skipped, any may follow any: their number counts twice.
_MOST_SKIPPED = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What NCCL was asked for.

    Attributes:
      number: of the operation.
      kind: ``"allred"``.
      dtype: ``"float32"``.
      count: elements.
      bytes: of these.
    """

    number: int
    kind: str
    dtype: str
    count: int
    bytes: int


@dataclasses.dataclass
class _Part:
    """A part of the automaton: where it begins and ends; whether it may be empty."""

    first: set[int]
    last: set[int]
    may_be_empty: bool


class _Automaton:
    """All programs of a process, as far as they use one communicator.

    Args:
      programs: of the process.
      members: processes of the communicator's ranks.
      ranks: how many there are.
      skips: whether each collective may have used another communicator.
    """

    def __init__(self, programs, members, ranks, skips):
        self.calls: list[Call] = []
        self.after: list[set[int]] = []
        self._skips = skips
        self.is_too_large = False
        self._is_of_one_process = len(members) == 1
        self.first: set[int] = set()
        last: set[int] = set()
        for program in programs:
            part = self._part(program.node, _serves(program, members, ranks))
            self.first |= part.first
            last |= part.last
        for place in last:
            self.after[place] |= self.first

    def _part(self, node: Node, serves) -> _Part:
        if isinstance(node, Call):
            if not serves(node):
                return _Part(set(), set(), True)
            self.calls.append(node)
            self.after.append(set())
            place = {len(self.calls) - 1}
            # XLA sums small arrays of one process by a kernel of its own.
            may_bypass = node.kind == "allred" and self._is_of_one_process
            may_be_empty = self._skips or may_bypass
            self.is_too_large |= may_be_empty and len(self.calls) > _MOST_SKIPPED
            return _Part(place, {*place}, may_be_empty and not self.is_too_large)
        how, *nodes = node
        parts = [self._part(each, serves) for each in nodes]
        if how == "either":
            return _Part(
                set().union(*(part.first for part in parts)),
                set().union(*(part.last for part in parts)),
                any(part.may_be_empty for part in parts),
            )
        whole = _Part(set(), set(), True)
        for part in parts:
            for place in whole.last:
                self.after[place] |= part.first
            whole.first |= part.first if whole.may_be_empty else set()
            whole.last = part.last | (whole.last if part.may_be_empty else set())
            whole.may_be_empty &= part.may_be_empty
        if how == "loop":
            for place in whole.last:
                self.after[place] |= whole.first
        whole.may_be_empty |= how == "maybe"
        return whole


def _serves(program: Program, members, ranks):
    def serves(call: Call) -> bool:
        if call.groups is None:
            return True
        owners = program.processes
        return any(
            len(group) == ranks
            and all(0 <= each < len(owners) for each in group)
            and {owners[each] for each in group} == members
            for group in call.groups
        )

    return serves


def _may_be(call: Call, asked: Asked) -> bool:
    if call.kind != asked.kind:
        return False
    if not call.sizes:
        return True
    if call.kind in ("allgat", "bcast"):
        # NCCL counts bytes of what it only moves.
        sizes = [bytes_ for _, _, bytes_ in call.sizes]
        return asked.bytes in sizes or (len(sizes) > 1 and asked.bytes <= sum(sizes))
    same = [count for dtype, count, _ in call.sizes if dtype in (asked.dtype, "")]
    return asked.count in same or (len(same) > 1 and asked.count <= sum(same))


def of_operations(
    programs: Sequence[Program],
    members: Collection[int],
    ranks: int,
    operations: Sequence[Asked],
    skips: bool,
) -> dict[int, str]:
    """Return what operations were, by number: ``"all-reduce.3, train.py:88"``.

    Args:
      programs: all that the process compiled.
      members: processes of the communicator's ranks.
      ranks: how many there are.
      operations: on record, the oldest first.
      skips: whether there are several communicators of the same ranks.
    """
    automaton = _Automaton(programs, {*members}, ranks, skips)
    if automaton.is_too_large:
        return {}
    fits: list[set[int]] = []
    number = None
    for asked in operations:
        matching = {i for i, c in enumerate(automaton.calls) if _may_be(c, asked)}
        if fits and number == asked.number - 1:
            follows = set().union(*(automaton.after[place] for place in fits[-1]))
            matching &= follows
        elif asked.number == 1:
            matching &= automaton.first
        if not matching:
            return {}
        fits.append(matching)
        number = asked.number
    for i in range(len(fits) - 2, -1, -1):
        if operations[i].number + 1 == operations[i + 1].number:
            fits[i] = {p for p in fits[i] if automaton.after[p] & fits[i + 1]}
    found = {}
    for asked, places in zip(operations, fits, strict=True):
        names = sorted({automaton.calls[place].name for place in places})
        if len(names) == 1:
            found[asked.number] = names[0]
        elif len(names) <= _MOST_NAMED:
            found[asked.number] = "one of " + "; ".join(names)
    return found


def of_rings(
    rings: Sequence[Ring], programs: Mapping[int, Sequence[Program] | None]
) -> dict[Place, dict[int, str]]:
    """Return what collectives were, by communicator and rank, then by their order.

    Args:
      rings: one of each process.
      programs: what each process compiled. None if not all of that is known.
    """
    members: dict[int, set[int]] = {}
    for ring in rings:
        for block in ring.blocks:
            members.setdefault(block.id, set()).add(ring.process)
    found = {}
    for ring in rings:
        compiled = programs.get(ring.process)
        used = [
            (block, [o for o in block.operations if not o.is_peer])
            for block in ring.blocks
        ]
        used = [(block, operations) for block, operations in used if operations]
        for block, operations in used:
            # XLA may have several for the same GPUs. It says of none what it is for.
            alike = sum(
                (other.rank, members[other.id]) == (block.rank, members[block.id])
                for other, _ in used
            )
            if compiled:
                found[block.id, block.rank] = of_operations(
                    compiled,
                    members[block.id],
                    block.ranks,
                    [
                        Asked(
                            number=each.order,
                            kind=each.collective,
                            dtype=each.dtype,
                            count=each.count,
                            bytes=each.bytes,
                        )
                        for each in operations
                    ],
                    skips=alike > 1,
                )
    return found
