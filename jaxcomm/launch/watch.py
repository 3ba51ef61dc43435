"""Watch what the processes do, and tell when they do nothing any more.

On GPUs, NCCL loads a library of ours, which writes what XLA's own collectives do into
files. The program need not know of it. On CPUs there is no NCCL. All that is seen of
any program is its CPU time.
"""

import collections
import dataclasses
import pathlib
import socket
import time
from collections.abc import Callable

import jaxcomm
from jaxcomm.diagnostics import lines, of_nccl, programs, ring, still, suspect
from jaxcomm.diagnostics.merge import merge
from jaxcomm.diagnostics.record import RecordError
from jaxcomm.diagnostics.ring import Ring
from jaxcomm.launch import devices, records
from jaxcomm.launch.options import Options
from jaxcomm.launch.witness import Witness

LIBRARY = "libjaxcomm_watch.so"
_PLUGIN = "NCCL_PROFILER_PLUGIN"
# What runs beside a program that waits, such as heartbeats, takes a tenth of this.
_LEAST_CPU_SECONDS = 0.1
_LEAST_CPU_SHARE = 0.005
ON_CPUS = (
    "--watch: on CPUs there is no NCCL to watch. No progress means that the CPU time "
    "of a process stands still"
)


def is_of_cpus(options: Options) -> bool:
    """Return whether the processes are watched without NCCL."""
    return (options.platform or "").split(",")[0] == devices.CPU


def refusal(inherited: dict[str, str]) -> str:
    """Return why NCCL cannot be watched, if so."""
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


@dataclasses.dataclass(frozen=True)
class Held:
    """What is told of processes that do nothing any more.

    Attributes:
      how: a text.
      process: who holds up the others. If None, that is not certain.
      still: on CPUs, those whose CPU time stands still.
      may_go_on: whether it is too early to end all, though they may start again.
    """

    how: str
    process: int | None = None
    still: frozenset[int] = frozenset()
    may_go_on: bool = False


class NcclWatch:
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

    def look(self, witness: Witness) -> Held | None:
        """Return who holds up the others, and how, once for each time.

        Nobody does while all are equally far: they compute, or compile. If their main
        threads wait while nothing is known of their GPUs, that is told without a name.
        """
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + min(self.seconds / 15, 1.0)
        rings = self._rings()
        progress = tuple((each.process, each.progress) for each in rings)
        if progress != self._progress:
            self._progress, self._since, self._has_told = progress, now, False
        if self._has_told or now - self._since < self.seconds:
            return None
        found = of_nccl.records(rings, socket.gethostname(), time.time(), {})
        merged = merge(found, witness.seen()) if found else None
        suspects = suspect.judge(merged.accounts) if merged and merged.findings else ()
        if not suspects:
            return self._cannot_tell(rings, witness)
        self._has_told = True
        return Held(
            "; ".join(of_nccl.notes(rings, self._lines(rings))), suspects[0].process
        )

    def _cannot_tell(self, rings, witness):
        """Say so if all are equally far and wait, and NCCL tells nothing of GPUs."""
        reached = of_nccl.untold(rings)
        if not reached or not still.all_wait(witness.seen()):
            return None
        self._has_told = True
        return Held(
            f"cannot tell: all have enqueued {reached}, their main threads wait, and "
            "NCCL does not tell what their GPUs have ended",
            may_go_on=True,
        )

    def _lines(self, rings):
        compiled = {
            each.process: programs.beside(
                self._folder / f"nccl-{each.process}{ring.SUFFIX}", each.pid
            )
            for each in rings
        }
        return lines.of_rings(rings, compiled)

    def _rings(self) -> list[Ring]:
        found = []
        for path in records.rings_of_run(self._folder, self._begin):
            try:
                found.append(ring.load(path))
            except RecordError:
                continue  # It is being made.
        return found


class CpuWatch:
    """Looks at the CPU time of processes.

    Args:
      seconds: a process whose threads have run for less than 0.1 s, or 0.5 % of this,
        in so long, stands still.
      clock: as ``time.monotonic``.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._next = clock()
        # By process: when it had run for how many seconds, as long as that matters.
        self._ran: dict[int, collections.deque[tuple[float, float]]] = {}
        self._told: frozenset[int] = frozenset()

    def left(self) -> float:
        """Return the seconds until the next look."""
        return max(self._next - self._clock(), 0.0)

    def look(self, witness: Witness) -> Held | None:
        """Return which processes stand still, once for each time."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + min(self.seconds / 10, 1.0)
        usages = witness.usages()
        self._ran = {
            process: self._ran.get(process, collections.deque()) for process in usages
        }
        for process, usage in usages.items():
            self._ran[process].append((now, usage.cpu))
        stopped = frozenset(n for n in usages if self._stood_still(n, self.seconds))
        self._told &= stopped
        # Those that have just begun to stand still are about to join them.
        halfway = {n for n in usages if self._stood_still(n, self.seconds / 2)}
        if halfway > stopped or stopped <= self._told:
            return None
        self._told = stopped
        numbers = ", ".join(map(str, sorted(stopped)))
        whose = f"process{'es' if len(stopped) > 1 else ''} {numbers}"
        is_stuck = still.may_be_stuck(witness.seen(), stopped)
        return Held(
            f"the CPU time of {whose} stands still", None, stopped, not is_stuck
        )

    def _stood_still(self, process, seconds) -> bool:
        ran = self._ran[process]
        now, cpu = ran[-1]
        while len(ran) > 1 and ran[1][0] <= now - self.seconds:
            ran.popleft()
        before = [(then, had) for then, had in ran if then <= now - seconds]
        least = max(_LEAST_CPU_SECONDS, _LEAST_CPU_SHARE * seconds)
        return bool(before) and cpu - before[-1][1] < least
