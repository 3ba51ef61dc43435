"""Read the files that :func:`jaxcomm.checksums.save` writes; anybody may have done so.

Each line is checked whole before it is used. What is missing is an error: a record that
lacks something must not look like one that is equal.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections import Counter
from typing import Any

from jaxcomm import own_file
from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.checksums import (
    MOST_ENTRIES,
    VERSION,
    Entry,
    Site,
    unequal_counts,
)
from jaxcomm.diagnostics.record import MOST_PROCESSES
from jaxcomm.diagnostics.record import quoted as _quoted

Mesh = tuple[tuple[str, int], ...]
# Entries with some hundred operands each.
MOST_BYTES_OF_A_LINE = 1 << 30
_MOST_NUMBER = 1 << 31


@dataclasses.dataclass(frozen=True)
class Run:
    """The checksums of one run.

    Attributes:
      steps: the entries of each step, process by process.
      unrecorded: the calls that no device handed over, and why.
    """

    steps: dict[int, list[Entry]]
    unrecorded: frozenset[str]

    @functools.cached_property
    def meshes(self) -> frozenset[Mesh]:
        """Those of all calls."""
        return frozenset(e.site.mesh for every in self.steps.values() for e in every)

    def unrecorded_like(self, site: Site) -> bool:
        """Say whether a call of this name and axes was left out."""
        begin = f"{site.name} over {site.axes}:"
        return any(each.startswith(begin) for each in self.unrecorded)


@dataclasses.dataclass(frozen=True)
class _Line:
    """What one process saved of one step."""

    step: int
    process: int
    processes: int
    start: str
    dropped: int
    unrecorded: tuple[str, ...]
    entries: tuple[Entry, ...]


def load(folder: str | os.PathLike[str]) -> Run:
    """Read what all processes of a run wrote by :func:`jaxcomm.checksums.save`.

    Raises:
      ValueError: a file, a step or an entry is missing or damaged, or there were more
        entries than are kept.
    """
    name = table.plain(os.fspath(folder))
    paths = sorted(pathlib.Path(folder).glob("checksums-*.jsonl"))
    if not paths:
        raise ValueError(f"{name}: no checksums of a run are there")
    found: dict[int, dict[int, _Line]] = {}
    for path in paths:
        for step, line in _steps_of(path).items():
            if line.process in found.setdefault(step, {}):
                raise ValueError(f"{name}: several files are of process {line.process}")
            found[step][line.process] = line
    steps = {step: _of_step(name, step, found[step]) for step in sorted(found)}
    every = (line for of_step in found.values() for line in of_step.values())
    return Run(steps, frozenset().union(*(line.unrecorded for line in every)))


def _steps_of(path) -> dict[int, _Line]:
    """Return the lines of a file by step, each step as it was taken last."""
    found: dict[int, _Line] = {}
    start = None
    name = table.plain(str(path))
    for number, text in enumerate(_lines(path), 1):
        try:
            line = parse(text)
        except ValueError as error:
            raise ValueError(
                f"{name}, line {number}: not checksums of jaxcomm: {error}"
            ) from None
        if line.start != start:
            # Resumed from here: the steps that follow are taken again.
            found = {step: each for step, each in found.items() if step < line.step}
            start = line.start
        if line.step in found:
            raise ValueError(f"{name}, line {number}: its step was saved before")
        found[line.step] = line
    return found


def _lines(path):
    try:
        with own_file.opened(path) as file:
            while line := file.readline(MOST_BYTES_OF_A_LINE):
                yield line
    except OSError as error:
        raise ValueError(f"{table.plain(str(path))}: {error.strerror}") from None


class _Wrong(ValueError):
    def __init__(self, what: str, value):
        super().__init__(f"{_quoted(what)} is {_quoted(value)}")


def parse(line: bytes) -> _Line:
    """Read a line of a file.

    Raises:
      ValueError: it is not what :func:`jaxcomm.checksums.save` writes.
    """
    try:
        document = json.loads(line)
    except RecursionError:
        raise _Wrong("nesting", "too deep") from None
    if _get(document, "version", int) != VERSION:
        raise ValueError(f"version {document['version']}, this jaxcomm reads {VERSION}")
    sites = [_site(each) for each in _get(document, "sites", list)]
    found = _Line(
        **{name: _get(document, name, int) for name in ("step", "process")},
        **{name: _get(document, name, int) for name in ("processes", "dropped")},
        start=_get(document, "start", str),
        unrecorded=_texts(document, "unrecorded"),
        entries=tuple(_entry(each, sites) for each in _get(document, "entries", list)),
    )
    if not found.process < found.processes <= MOST_PROCESSES:
        raise _Wrong("process", f"{found.process} of {found.processes}")
    return found


def _site(document) -> Site:
    mesh = _get(document, "mesh", dict)
    names = ("program", "name", "scope", "collective")
    return Site(
        **{name: _get(document, name, str) for name in names},
        axes=_texts(document, "axes"),
        number=_get(document, "number", int),
        replicated=_get(document, "replicated", bool),
        mesh=tuple((table.plain(axis), _get(mesh, axis, int)) for axis in mesh),
        operands=_texts(document, "operands"),
        results=_texts(document, "results"),
    )


def _entry(row, sites) -> Entry:
    if not isinstance(row, list) or len(row) != 4:
        raise _Wrong("entry", row)
    number, at, *sums = row
    if not _is_a(number, int) or number >= len(sites):
        raise _Wrong("entry site", number)
    site = sites[number]
    sizes = [size for _, size in site.mesh]
    is_there = isinstance(at, list) and len(at) == len(sizes)
    if not is_there or not all(
        _is_a(i, int) and i < size for i, size in zip(at, sizes, strict=True)
    ):
        raise _Wrong("device place", at)
    for found, expected in zip(sums, (site.operands, site.results), strict=True):
        if (
            not isinstance(found, list)
            or len(found) != len(expected)
            or not all(isinstance(each, str) for each in found)
        ):
            raise _Wrong("entry sums", found)
    return Entry(site, tuple(at), *map(tuple, sums))


def _get(document, name, kind) -> Any:
    if not isinstance(document, dict):
        raise _Wrong(f"what has {name}", document)
    if name not in document:
        raise _Wrong(name, "missing")
    if not _is_a(value := document[name], kind):
        raise _Wrong(name, value)
    return table.plain(value) if kind is str else value


def _texts(document, name) -> tuple[str, ...]:
    found = _get(document, name, list)
    if not all(isinstance(each, str) for each in found):
        raise _Wrong(name, found)
    return tuple(map(table.plain, found))


def _is_a(value, kind) -> bool:
    if kind is int:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return is_number and 0 <= value < _MOST_NUMBER
    return isinstance(value, kind)


def _of_step(folder, step, of_processes: dict[int, _Line]) -> list[Entry]:
    """Return the entries of a step, which must be all that there were."""
    where = f"{folder}, step {step}"
    counts = sorted({each.processes for each in of_processes.values()})
    count = counts[0]
    if len(counts) > 1:
        raise ValueError(
            f"{where}: written by runs of {counts} processes. Name a folder for each"
        )
    if missing := sorted(set(range(count)) - set(of_processes)):
        listed = table.numbers(missing)
        raise ValueError(f"{where}: nothing from processes [{listed}] of {count}")
    if dropped := sum(each.dropped for each in of_processes.values()):
        raise ValueError(
            f"{where}: {dropped} more calls than the {MOST_ENTRIES} that are kept. "
            f"Save more often"
        )
    every = [e for _, each in sorted(of_processes.items()) for e in each.entries]
    for site, times in unequal_counts(every):
        raise ValueError(f"{where}: {site.where} ended {times}")
    present = {(entry.site, entry.group, entry.at) for entry in every}
    ranks = Counter((site, group) for site, group, _ in present)
    for (site, _), found in ranks.items():
        expected = math.prod(size for axis, size in site.mesh if axis in site.axes)
        if found != expected:
            raise ValueError(f"{where}: {site.where}: {found} of {expected} ranks")
    return every
