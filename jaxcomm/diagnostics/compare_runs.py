"""Find the first collective at which two runs differ, from their checksums."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.checksum_files import Mesh, Run, load
from jaxcomm.diagnostics.checksums import Entry, Site


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first collective at which two runs differ.

    Attributes:
      step: as it was saved.
      site: the call in the program, of the first run if that has it.
      turn: how many-th time the devices came to the site in this step, from 0.
      rank: the coordinates of a device in the mesh, ``{"data": 1}``; the smallest of
        those that differ. None if it is all, or meshes differ in size.
      what: ``"operands"``, ``"results"`` or ``"calls"``.
    """

    step: int
    site: Site
    turn: int
    rank: dict[str, int] | None
    what: str

    def __str__(self) -> str:
        """Say it in one line."""
        on = "" if self.rank is None else f" on {self.rank}"
        turn = f", turn {self.turn}" if self.turn else ""
        return f"step {self.step}, {self.site.where}{turn}: {self.what} differ{on}"


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What came of comparing two runs.

    Attributes:
      first: the first difference. None if whatever could be compared is equal.
      compared: how many calls were compared up to there.
      skipped: the calls that could not be compared, and why.
    """

    first: Difference | None
    compared: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        """Say it in a line, and one more for each call that was not compared."""
        equal = f"all {self.compared} calls that were compared are equal"
        lines = [str(self.first) if self.first else equal]
        return "\n".join([*lines, *(f"not compared: {each}" for each in self.skipped)])

    __repr__ = __str__


def compare(
    first: str | os.PathLike[str], second: str | os.PathLike[str]
) -> Comparison:
    """Find the first collective at which two runs differ.

    Both ran with ``JAXCOMM_CHECKSUMS=1`` and called :func:`jaxcomm.checksums.save`
    after each step. Runs on meshes of one shape are compared on every device, operands
    and results. If the meshes differ in size, results are compared that all ranks of a
    call share, such as those of ``psum``.

    Calls are told apart by program, name, axes and number: change nothing else between
    the runs. In a step, calls are in the order in which process 0 had their results.

    Args:
      first, second: the folders of the runs.

    Returns:
      A :class:`~jaxcomm.diagnostics.compare_runs.Comparison`, which prints the first
      difference, and what could not be compared.

    Raises:
      ValueError: a record is damaged or lacks a process, a step or an entry; one run
        has other steps; or there is nothing to compare.

    Example:
      >>> print(jaxcomm.checksums.compare("run_a", "run_b"))  # doctest: +SKIP
      step 3, psum over ('data',) number 0 of jit_step: operands differ on {'data': 1}
    """
    runs = load(first), load(second)
    if alone := sorted(runs[0].steps.keys() ^ runs[1].steps.keys()):
        raise ValueError(
            "checksums.compare: one of the runs alone has steps "
            f"[{table.numbers(alone)}]"
        )
    compared = 0
    skipped = dict.fromkeys(sorted(runs[0].unrecorded | runs[1].unrecorded))
    for step in runs[0].steps:
        for found in _compared(step, *runs):
            if isinstance(found, str):
                skipped[found] = None
            elif found is None:
                compared += 1
            else:
                return Comparison(found, compared, tuple(skipped))
    if not compared:
        raise ValueError(
            "checksums.compare: nothing can be compared: "
            f"{'; '.join(skipped) or 'no call'}"
        )
    return Comparison(None, compared, tuple(skipped))


# A place in a program: name, axes, number and program.
Place = tuple[str, tuple[str, ...], int, str]


class _Step:
    """The calls of a step, in the order of process 0.

    Attributes:
      calls: (place, mesh, turn) -> coordinates of a device -> its entry.
      turns: place -> mesh -> how often devices came there.
    """

    def __init__(self, entries: list[Entry]):
        self.calls: dict[tuple[Place, Mesh, int], dict[tuple[int, ...], Entry]] = {}
        self.turns: dict[Place, Counter] = {}
        times: Counter = Counter()
        for entry in entries:
            site = entry.site
            place = site.name, site.axes, site.number, site.program
            turn = times[place, site.mesh, entry.at]
            times[place, site.mesh, entry.at] += 1
            self.calls.setdefault((place, site.mesh, turn), {})[entry.at] = entry
        for place, mesh, _ in self.calls:
            self.turns.setdefault(place, Counter())[mesh] += 1


def _compared(step: int, *runs: Run) -> Iterator[Difference | str | None]:
    """Yield of each call what differs, None if nothing, or why it is not compared."""
    a, b = (_Step(run.steps[step]) for run in runs)
    for call in {**a.calls, **b.calls}:
        place, mesh, turn = call
        ours, theirs = (each.turns.get(place, {}) for each in (a, b))
        alone = [each for each in ours if each not in theirs]
        instead = [each for each in theirs if each not in ours]
        entries = (a if call in a.calls else b).calls[call]
        site = next(iter(entries.values())).site
        if mesh in ours and mesh in theirs:
            found = _of_one_mesh(a.calls.get(call, {}), b.calls.get(call, {}))
        elif not (alone and instead):
            found = _of_one_run(site, runs[0] if mesh in theirs else runs[1])
        elif mesh in theirs:
            continue  # compared with what the first run has in its place
        elif len(alone) > 1 or len(instead) > 1:
            found = "called over several meshes in a step"
        elif ours[mesh] != theirs[instead[0]]:
            found = f"called {ours[mesh]} and {theirs[instead[0]]} times in a step"
        else:
            found = _of_two_meshes(entries, b.calls[place, instead[0], turn])
        if found is None or isinstance(found, str):
            yield found and f"{site.where}: {found}"
        else:
            what, rank = found
            yield Difference(step, site, turn, rank, what)


Found = tuple[str, dict[str, int] | None] | str | None


def _of_one_run(site: Site, other: Run) -> Found:
    """Say what it means that a run does not have a call in a step."""
    if other.unrecorded_like(site):
        return "one of the runs did not record it"
    # A run over meshes of other sizes may call other collectives.
    if other.meshes and site.mesh not in other.meshes:
        return "one run alone called it in a step"
    return "calls", None


def _of_one_mesh(a: Mapping, b: Mapping) -> Found:
    sites = {entry.site for entry in (*a.values(), *b.values())}
    if len(sites) > 1 or a.keys() != b.keys():
        return "calls", None
    (site,) = sites
    for what in ("operands", "results"):
        for at in sorted(a):
            if getattr(a[at], what) != getattr(b[at], what):
                return what, dict(zip(dict(site.mesh), at, strict=True))
    return None


def _of_two_meshes(a: Mapping, b: Mapping) -> Found:
    one, other = (next(iter(each.values())).site for each in (a, b))
    if not one.replicated or not other.replicated:
        return "ranks have results of their own, and the meshes differ in size"
    if one.results != other.results:
        return f"results are {one.results} and {other.results}"
    rest = [
        [(axis, size) for axis, size in site.mesh if axis not in site.axes]
        for site in (one, other)
    ]
    if rest[0] != rest[1]:
        return "the meshes differ in size along other axes"
    both = (*a.values(), *b.values())
    for group in {entry.group for entry in both}:
        if len({entry.results for entry in both if entry.group == group}) > 1:
            return "results", None
    return None
