"""Checksums of what collectives take and return, to find where two runs part.

Lowering declares each call as a :class:`Site` and has every device hand over its
checksums when it has the results. This module keeps them until they are saved.

A file has one JSON document a line, one for each :func:`save_checksums`::

    {"version": 1, "step": 3, "process": 0, "processes": 1, "start": "9f86d081884c7d65",
     "dropped": 0, "unrecorded": [],
     "sites": [{"program": "jit_step", "name": "psum", "axes": ["data"], "number": 0,
       "scope": "transpose(jvp())", "collective": "all_reduce", "replicated": true,
       "mesh": {"data": 2}, "operands": ["float32[4]"], "results": ["float32[4]"]}],
     "entries": [[0, [1], ["5bd1e9955bd1e995"], ["8a2c1f0b77e01d43"]]]}

A process has another ``start`` each time it is started. An entry is what one device did
once: the site, its coordinates in the mesh, and the checksums of its operands and
results. A device's entries are in the order in which it had the results.
"""

import dataclasses
import json
import os
import pathlib
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import jax

from jaxcomm import config

VERSION = 1
# Entries that are kept between two saves: some hundred MB.
MOST_ENTRIES = 1 << 20
_START = secrets.token_hex(8)


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of a collective in a program.

    Attributes:
      program: its name in XLA, ``"jit_step"``.
      name: what the user called, ``"psum"``.
      axes: the mesh axes of the call.
      number: of the calls of this name and axes in the program, from 0.
      scope: the names around it, such as ``"transpose(jvp())"`` of a gradient.
      collective: ``"all_reduce"``.
      replicated: whether every rank gets the same result.
      mesh: the mesh's axes and their sizes, in order.
      operands: their types on one rank, ``"float32[4,8]"``.
      results: their types on one rank.
    """

    program: str
    name: str
    axes: tuple[str, ...]
    number: int
    scope: str
    collective: str
    replicated: bool
    mesh: tuple[tuple[str, int], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def where(self) -> str:
        """What messages call it, as ``psum over ('data',) number 0 of jit_step``."""
        scope = f" in {self.scope}" if self.scope else ""
        return (
            f"{self.name} over {self.axes} number {self.number} of "
            f"{self.program}{scope}"
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one device did once.

    Attributes:
      site: the call in the program.
      at: the device's coordinates in the mesh, in the order of ``site.mesh``.
      operands: their checksums.
      results: their checksums.
    """

    site: Site
    at: tuple[int, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def group(self) -> tuple[int, ...]:
        """The coordinates along the axes that are not of the call."""
        sizes = zip(self.site.mesh, self.at, strict=True)
        return tuple(at for (axis, _), at in sizes if axis not in self.site.axes)


class _Store:
    """What devices handed over since the last save."""

    def __init__(self):
        self._lock = threading.Lock()
        self._clear()

    def _clear(self):
        self._entries, self._dropped = [], 0

    def add(self, site: Site, words: list[int]) -> None:
        with self._lock:
            if len(self._entries) < MOST_ENTRIES:
                self._entries.append((site, words))
            else:
                self._dropped += 1

    def take(self):
        with self._lock:
            taken = self._entries, self._dropped
            self._clear()
        return taken


_store = _Store()
# What is traced but never recorded, and why. It is told with every save.
_unrecorded: set[str] = set()


def add(site: Site, words: list[int]) -> None:
    """Keep what a device hands over.

    Args:
      site: the call.
      words: of 32 bits: the device's coordinates in the mesh, then the two halves of
        each operand's checksum, and of each result's.
    """
    _store.add(site, words)


def note_unrecorded(what: str) -> None:
    """Remember a call that no device will hand over."""
    _unrecorded.add(what)


def save_checksums(folder: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Append the checksums of all collectives since the last call to a file.

    For programs that run with ``JAXCOMM_CHECKSUMS=1``. Call it in every process, after
    each step, when the step's results are ready. :func:`jaxcomm.compare_runs` reads the
    folders of two runs and names the first collective at which they differ.

    Args:
      folder: of the run, made if it is missing. Process ``i`` writes
        ``checksums-<i>.jsonl``. Step 0 replaces an older file. A program that is
        started again goes on in it, from whatever step it resumes.
      step: its number, from 0.

    Returns:
      The path of the file.

    Raises:
      OSError: if the file cannot be written.
      RuntimeError: without ``JAXCOMM_CHECKSUMS=1``, or if ranks of this process have
        handed over different numbers of calls: results were not ready yet.
      TypeError: if the step is no integer.

    Example:
      >>> jaxcomm.save_checksums("run_a", step=0)  # doctest: +SKIP
    """
    if not config.checksums():
        raise RuntimeError(
            "save_checksums: nothing is recorded. Start the program with "
            "JAXCOMM_CHECKSUMS=1: it is read when jaxcomm is imported"
        )
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise TypeError(f"save_checksums: step must be an integer from 0, got {step!r}")
    words_of_all, dropped = _store.take()
    entries = [_entry(site, words) for site, words in words_of_all]
    if not dropped:  # the record says so itself
        _check_complete(entries)
    index = {site: i for i, site in enumerate(dict.fromkeys(e.site for e in entries))}
    document = {
        "version": VERSION,
        "step": step,
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "start": _START,
        "dropped": dropped,
        "unrecorded": sorted(_unrecorded),
        "sites": [_as_json(site) for site in index],
        "entries": [[index[e.site], e.at, e.operands, e.results] for e in entries],
    }
    path = pathlib.Path(folder) / f"checksums-{jax.process_index()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if step else "w", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")
    return path


def _as_json(site):
    return dataclasses.asdict(site) | {"mesh": dict(site.mesh)}


def _entry(site, words):
    at, count = len(site.mesh), len(site.operands)
    halves = zip(words[at::2], words[at + 1 :: 2], strict=True)
    sums = tuple(f"{first:08x}{second:08x}" for first, second in halves)
    return Entry(site, tuple(words[:at]), sums[:count], sums[count:])


def unequal_counts(entries: Iterable[Entry]) -> Iterator[tuple[Site, str]]:
    """Yield the sites at which ranks of one group ended calls in unequal numbers."""
    counts: dict[tuple, Counter] = {}
    for entry in entries:
        counts.setdefault((entry.site, entry.group), Counter())[entry.at] += 1
    for (site, _), found in counts.items():
        if len(set(found.values())) > 1:
            most, least = max(found.values()), min(found.values())
            yield site, f"{most} times on some devices and {least} times on others"


def _check_complete(entries):
    for site, counts in unequal_counts(entries):
        raise RuntimeError(
            f"save_checksums: {site.where} ended {counts}. Call jax.block_until_ready "
            f"on the step's results first"
        )
