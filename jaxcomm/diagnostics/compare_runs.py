"""Find the first collective at which two runs differ, from their checksums."""

import dataclasses
import json
import math
import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcomm.diagnostics.checksums import (
    MOST_ENTRIES,
    VERSION,
    Entry,
    Site,
    unequal_counts,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The checksums of one run.

    Attributes:
      steps: the entries of each step, process by process.
      unrecorded: the calls that no device handed over, and why.
    """

    steps: dict[int, list[Entry]]
    unrecorded: frozenset[str]


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


@dataclasses.dataclass(frozen=True)
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


def compare_runs(
    first: str | os.PathLike[str], second: str | os.PathLike[str]
) -> Comparison:
    """Find the first collective at which two runs differ.

    Both ran with ``JAXCOMM_CHECKSUMS=1`` and called :func:`jaxcomm.save_checksums`
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
      >>> print(jaxcomm.compare_runs("run_a", "run_b"))  # doctest: +SKIP
      step 3, psum over ('data',) number 0 of jit_step: operands differ on {'data': 1}
    """
    runs = load(first), load(second)
    if alone := sorted(runs[0].steps.keys() ^ runs[1].steps.keys()):
        raise ValueError(f"compare_runs: one of the runs alone has steps {alone}")
    compared = 0
    skipped = dict.fromkeys(sorted(runs[0].unrecorded | runs[1].unrecorded))
    for step in runs[0].steps:
        for found in _compared(*(_Step(run.steps[step]) for run in runs)):
            if isinstance(found, str):
                skipped[found] = None
            elif found is None:
                compared += 1
            else:
                where = dataclasses.replace(found, step=step)
                return Comparison(where, compared, tuple(skipped))
    if not compared:
        raise ValueError(
            f"compare_runs: nothing can be compared: {'; '.join(skipped) or 'no call'}"
        )
    return Comparison(None, compared, tuple(skipped))


# A place in a program: name, axes, number and program.
Place = tuple[str, tuple[str, ...], int, str]


class _Step:
    """The calls of a step, in the order of process 0.

    Attributes:
      calls: (place, turn) -> coordinates of a device -> its entry.
      turns: how often devices came to each place.
      meshes: of all calls.
    """

    def __init__(self, entries: list[Entry]):
        self.calls: dict[tuple[Place, int], dict[tuple[int, ...], Entry]] = {}
        turns: Counter = Counter()
        for entry in entries:
            site = entry.site
            place = site.name, site.axes, site.number, site.program
            turn = turns[place, entry.at]
            turns[place, entry.at] += 1
            self.calls.setdefault((place, turn), {})[entry.at] = entry
        self.turns = Counter(place for place, _ in self.calls)
        self.meshes = {entry.site.mesh for entry in entries}


def _compared(a: _Step, b: _Step) -> Iterator[Difference | str | None]:
    """Yield of each call what differs, None if nothing, or why it is not compared."""
    is_same_mesh = a.meshes == b.meshes
    for place, turn in {**a.calls, **b.calls}:
        ours, theirs = (each.calls.get((place, turn), {}) for each in (a, b))
        site = next(iter({**ours, **theirs}.values())).site
        if is_same_mesh:
            found = _of_one_mesh(ours, theirs)
        elif a.turns[place] != b.turns[place]:
            counts = f"{a.turns[place]} and {b.turns[place]} times"
            yield f"{site.where}: called {counts} in a step"
            continue
        else:
            found = _of_two_meshes(ours, theirs)
        if found is None or isinstance(found, str):
            yield found and f"{site.where}: {found}"
            continue
        what, rank = found
        yield Difference(-1, site, turn, rank, what)


Found = tuple[str, dict[str, int] | None] | str | None


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


def load(folder: str | os.PathLike[str]) -> Run:
    """Read what all processes of a run wrote by :func:`save_checksums`.

    Raises:
      ValueError: a file, a step or an entry is missing or damaged, or there were more
        entries than are kept.
    """
    paths = sorted(pathlib.Path(folder).glob("checksums-*.jsonl"))
    if not paths:
        raise ValueError(f"{os.fspath(folder)}: no checksums of a run are there")
    documents: dict[int, dict[int, dict]] = {}
    for path in paths:
        for step, document in _steps_of(path).items():
            documents.setdefault(step, {})[document["process"]] = document
    steps = {
        step: _of_step(folder, step, documents[step]) for step in sorted(documents)
    }
    every = (each for of_step in documents.values() for each in of_step.values())
    return Run(steps, frozenset().union(*(each["unrecorded"] for each in every)))


def _steps_of(path):
    """Return the documents of a file by step, each step as it was taken last."""
    found, start = {}, None
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        document = _parsed(line, f"{path}, line {number}")
        step = document["step"]
        if document["start"] != start:
            # Resumed from here: the steps that follow are taken again.
            found = {before: each for before, each in found.items() if before < step}
            start = document["start"]
        if step in found:
            raise ValueError(f"{path}, line {number}: its step was saved before")
        found[step] = document
    return found


def _parsed(line, where):
    try:
        document = json.loads(line)
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}, this one reads {VERSION}")
        sites = [
            Site(**{name: _frozen(value) for name, value in site.items()})
            for site in document["sites"]
        ]
        document["entries"] = [
            Entry(sites[i], tuple(at), tuple(operands), tuple(results))
            for i, at, operands, results in document["entries"]
        ]
        for name in ("step", "process", "processes", "start", "dropped", "unrecorded"):
            document[name]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{where}: not checksums of jaxcomm: {error!r}") from None
    return document


def _frozen(value) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _of_step(folder, step, of_processes):
    """Return the entries of a step, which must be all that there were."""
    where = f"{os.fspath(folder)}, step {step}"
    counts = sorted({each["processes"] for each in of_processes.values()})
    count = counts[0]
    if len(counts) > 1:
        raise ValueError(
            f"{where}: written by runs of {counts} processes. Name a folder for each"
        )
    if missing := sorted(set(range(count)) - set(of_processes)):
        raise ValueError(f"{where}: nothing from processes {missing} of {count}")
    if dropped := sum(each["dropped"] for each in of_processes.values()):
        raise ValueError(
            f"{where}: {dropped} more calls than the {MOST_ENTRIES} that are kept. "
            f"Save more often"
        )
    every = [e for _, each in sorted(of_processes.items()) for e in each["entries"]]
    for site, counts in unequal_counts(every):
        raise ValueError(f"{where}: {site.where} ended {counts}")
    present = {(entry.site, entry.group, entry.at) for entry in every}
    ranks = Counter((site, group) for site, group, _ in present)
    for (site, _), found in ranks.items():
        expected = math.prod(size for axis, size in site.mesh if axis in site.axes)
        if found != expected:
            raise ValueError(f"{where}: {site.where}: {found} of {expected} ranks")
    return every
