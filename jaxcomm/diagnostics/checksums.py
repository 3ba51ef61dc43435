"""Checksums of what collectives take and return, to find where two runs part.

Lowering declares each call as a :class:`Site`, with the devices of this process that
come to it, and has every device hand over its checksums when it has the results. This
module keeps them until they are saved. To save is to wait, look, write and only then
forget: who came is counted against who was declared.

A file has one JSON document a line, one for each :func:`jaxcomm.checksums.save`::

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
import operator
import os
import pathlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from jaxcomm import compat, config

VERSION = 1
# Entries that are kept between two saves: some hundred MB.
MOST_ENTRIES = 1 << 20
_LONGEST_WHERE = 500
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
        where = (
            f"{self.name} over {self.axes} number {self.number} of "
            f"{self.program}{scope}"
        )
        return where if len(where) <= _LONGEST_WHERE else where[:_LONGEST_WHERE] + "..."

    def group_of(self, at: Sequence[int]) -> tuple[int, ...]:
        """Return a device's coordinates along the axes that are not of the call."""
        sizes = zip(self.mesh, at, strict=True)
        return tuple(at for (axis, _), at in sizes if axis not in self.axes)


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
        return self.site.group_of(self.at)


@dataclasses.dataclass(frozen=True, eq=False)
class _Lowered:
    """A call of one program.

    Attributes:
      site: the call.
      local: the coordinates in the mesh of this process's devices.
    """

    site: Site
    local: tuple[tuple[int, ...], ...]


class _Store:
    """What devices handed over since the last save."""

    def __init__(self):
        self._lock = threading.Lock()
        self._handed: list[tuple[_Lowered, list[int]]] = []
        self._dropped = 0

    def add(self, lowered: _Lowered, words: list[int]) -> None:
        with self._lock:
            if len(self._handed) < MOST_ENTRIES:
                self._handed.append((lowered, words))
            else:
                self._dropped += 1

    def look(self) -> tuple[list[tuple[_Lowered, list[int]]], int]:
        with self._lock:
            return list(self._handed), self._dropped

    def forget(self, count: int, dropped: int) -> None:
        """Forget what was saved. What came since :meth:`look` stays."""
        with self._lock:
            del self._handed[:count]
            self._dropped -= dropped


_store = _Store()
# What is traced but never recorded, and why. It is told with every save.
_unrecorded: set[str] = set()
# Of the devices for which calls were lowered.
_platforms: set[str] = set()


def declare(site: Site, mesh: jax.sharding.Mesh) -> Callable[[Iterable[int]], None]:
    """Declare a call of a program that is being lowered.

    Args:
      site: the call.
      mesh: of the devices that come to it.

    Returns:
      What a device is to call each time it has the results. It takes words of 32 bits:
      the device's coordinates in the mesh, then the two halves of each operand's
      checksum, and of each result's.
    """
    here = jax.process_index()
    local = tuple(
        at for at, each in np.ndenumerate(mesh.devices) if each.process_index == here
    )
    _platforms.update(each.platform for each in mesh.devices.flat)
    lowered = _Lowered(site, local)
    return lambda words: _store.add(lowered, list(map(int, words)))


def note_unrecorded(what: str) -> None:
    """Remember a call that no device will hand over."""
    _unrecorded.add(what)


def save(folder: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Append the checksums of all collectives since the last call to a file.

    For programs that run with ``JAXCOMM_CHECKSUMS=1``. Call it in every process, after
    each step. It waits until the devices have run what was launched before.
    :func:`jaxcomm.checksums.compare` reads the folders of two runs and names the first
    collective at which they differ.

    Args:
      folder: of the run, made if it is missing. Process ``i`` writes
        ``checksums-<i>.jsonl``. Step 0 replaces an older file. A program that is
        started again goes on in it, from whatever step it resumes.
      step: its number, from 0.

    Returns:
      The path of the file.

    Raises:
      OSError: if the file cannot be written. Nothing is lost: call it again.
      RuntimeError: without ``JAXCOMM_CHECKSUMS=1``, or if some devices of this process
        did not end a call that others ended. Nothing is lost here either.
      TypeError: if the step is no integer.
      ValueError: if the step is negative.

    Example:
      >>> jaxcomm.checksums.save("run_a", step=0)  # doctest: +SKIP
    """
    if not config.checksums():
        raise RuntimeError(
            "checksums.save: nothing is recorded. Start the program with "
            "JAXCOMM_CHECKSUMS=1: it is read when jaxcomm is imported"
        )
    step = _step(step)
    _wait()
    handed, dropped = _store.look()
    if not dropped:  # the record says so itself
        _check_whole(handed)
    entries = [_entry(lowered.site, words) for lowered, words in handed]
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
    _append(path, json.dumps(document) + "\n", is_first=step == 0)
    _store.forget(len(handed), dropped)
    return path


def _step(step) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"checksums.save: step must be an integer, got {step!r}")
    if number < 0:
        raise ValueError(f"checksums.save: step must not be negative, got {step!r}")
    return number


def _append(path, line: str, *, is_first: bool):
    """Write a line, or nothing: half a line would spoil the next."""
    with path.open("w" if is_first else "a", encoding="utf-8") as file:
        before = file.tell()
        try:
            file.write(line)
            file.flush()
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


def _wait():
    """Wait until the devices of this process have run what was launched before.

    A device runs programs in the order in which they were launched, and a callback is a
    part of its program. XLA's CPU client keeps that order among programs of several
    devices, and among those of one. So one of each kind is launched and waited for.
    """
    for platform in _platforms:
        try:
            devices = jax.local_devices(backend=platform)
        except compat.NO_DEVICES:
            continue  # lowered for devices of elsewhere
        for each in ([device] for device in devices):
            _run_on(each)
        _run_on(devices)


def _run_on(devices: list):
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    # Within the user's mesh JAX would refuse arrays of another.
    with jax.set_mesh(mesh):
        split = jax.NamedSharding(mesh, jax.P("devices"))
        zeros = jax.device_put(np.zeros(len(devices), np.float32), split)
        jax.block_until_ready(_negated(zeros))


@jax.jit
def _negated(x):
    return -x


def _check_whole(handed):
    """Raise if a device of a group did not end a call as often as the others here."""
    counts: dict[tuple, Counter] = {}
    for lowered, words in handed:
        at = tuple(words[: len(lowered.site.mesh)])
        group = lowered.site.group_of(at)
        counts.setdefault((lowered, group), Counter())[at] += 1
    for (lowered, group), found in counts.items():
        site = lowered.site
        times = {found[at] for at in lowered.local if site.group_of(at) == group}
        if len(times) > 1:
            raise RuntimeError(
                f"checksums.save: {site.where} ended {max(times)} times on some "
                f"devices and {min(times)} times on others. If another thread runs "
                f"it, call jax.block_until_ready on its results, and save again. If "
                f"the program failed, start it again from the last step that was saved"
            )


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
