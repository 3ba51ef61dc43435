"""Watch what NCCL does in each process, and tell when it does nothing any more.

NCCL loads a library of ours, which writes what XLA's own collectives do into files. The
program need not know of it. On CPUs there is no NCCL, and nothing is written.
"""

import pathlib
import socket
import time
from collections.abc import Callable, Sequence

import jaxcomm
from jaxcomm.diagnostics import ring, suspect
from jaxcomm.diagnostics.merge import merge
from jaxcomm.diagnostics.record import RecordError
from jaxcomm.diagnostics.ring import Ring
from jaxcomm.diagnostics.seen import Seen
from jaxcomm.launch import records

LIBRARY = "libjaxcomm_watch.so"
_PLUGIN = "NCCL_PROFILER_PLUGIN"
_LOOK_SECONDS = 0.2


def refusal(inherited: dict[str, str]) -> str:
    """Return why nothing can be watched, if so."""
    if not _library().exists():
        return f"--watch: this jaxcomm has no {LIBRARY}. Install a wheel for Linux"
    other = inherited.get(_PLUGIN)
    if other:
        return f"--watch: NCCL loads one profiler, and {_PLUGIN} is {other!r}. Unset it"
    return ""


def variables(folder: pathlib.Path) -> dict[str, str]:
    """Return what the environment of a watched process has."""
    return {_PLUGIN: str(_library()), "JAXCOMM_WATCH_DIR": str(folder)}


def _library():
    return pathlib.Path(jaxcomm.__file__).parent / LIBRARY


class Watch:
    """Looks at the files of an attempt.

    Args:
      folder: where they are.
      seconds: after so long without progress somebody is to blame.
      clock: as ``time.monotonic``.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.seconds = seconds
        self._folder = folder
        self._clock = clock
        self._begin = records.now()
        self._since = clock()
        self._next = self._since
        self._progress: tuple[object, ...] = ()
        self._has_told = False

    def left(self) -> float:
        """Return the seconds until the next look."""
        return max(self._next - self._clock(), 0.0)

    def look(self, seen: Callable[[], Sequence[Seen]]) -> tuple[int, str] | None:
        """Return who holds up the others, and how, once for each time.

        Nobody does while all are equally far: they compute, or compile.
        """
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + _LOOK_SECONDS
        rings = self._rings()
        progress = tuple((each.process, each.progress) for each in rings)
        if progress != self._progress:
            self._progress, self._since, self._has_told = progress, now, False
        if self._has_told or now - self._since < self.seconds:
            return None
        found = ring.records(rings, socket.gethostname(), time.time())
        merged = merge(found, seen()) if found else None
        suspects = suspect.judge(merged.accounts) if merged and merged.findings else ()
        if not suspects:
            return None
        self._has_told = True
        return suspects[0].process, "; ".join(ring.notes(rings))

    def _rings(self) -> list[Ring]:
        found = []
        for path in records.rings_of_run(self._folder, self._begin):
            try:
                found.append(ring.load(path))
            except RecordError:
                continue  # It is being made.
        return found
