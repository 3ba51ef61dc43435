"""What the launcher sees of its processes when one fails, and what they answer.

It looks before it stops anything. Each process that can answers SIGUSR1 by its flight
record, with the stacks of its Python threads.
"""

import dataclasses
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping

from jaxcomm.diagnostics.seen import Seen
from jaxcomm.launch import records
from jaxcomm.launch.process import Process, Usage

# A process takes milliseconds, and up to half a second if a thread keeps the lock of
# its interpreter.
PATIENCE_SECONDS = 2.0
# To tell whether CPU time moves on.
_LEAST_SECONDS = 0.1
# Between looks at records that are to come.
ANSWER_SECONDS = 0.02
# Part of one core.
_WORKS_FROM = 0.1
_ANSWERING = "SR"


@dataclasses.dataclass
class Inquiry:
    """A question to some processes.

    Attributes:
      awaited: whose records are to come, and what was there before.
      least: when it ends at the soonest, by ``time.monotonic()``.
      most: when it ends at the latest.
    """

    awaited: dict[int, object]
    least: float
    most: float


class Witness:
    """The launcher's knowledge of the processes of an attempt.

    Args:
      processes: by number.
      folder: of their flight records.
    """

    def __init__(self, processes: Mapping[int, Process], folder: pathlib.Path):
        self._processes = processes
        self._folder = folder
        self._host = socket.gethostname()
        self._status: dict[int, int] = {}
        self._order: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._asked: set[int] = set()
        self._before: dict[int, Usage | None] = {}

    def note(self, number: int, status: int, given_up: bool = False) -> None:
        """Note how a process ended, or that others go on without it."""
        if given_up:
            self._given_up.add(number)
        elif number not in self._given_up:
            self._status.setdefault(number, status)
        if status:
            self._order.setdefault(number, len(self._order) + 1)

    def note_request(self, running: Collection[int]) -> None:
        """Note that somebody asks those that run to end, which is no failure then."""
        self._asked = {*running} - self._order.keys()

    def look_at(self, process: Process) -> None:
        """Look at a process that was started again."""
        self._processes = {**self._processes, process.number: process}
        records.set_aside(self._folder, process.number)

    def forget(self, number: int) -> None:
        """Leave out a process whose end is told, and that others go on without."""
        self._processes = {n: p for n, p in self._processes.items() if n != number}
        for known in self._status, self._order:
            known.pop(number, None)
        self._given_up.discard(number)

    def ask(
        self, ask: Collection[int], await_from: Collection[int], most_seconds: float
    ) -> Inquiry:
        """Ask some processes for their records, and await those of some."""
        self._before = {n: p.usage() for n, p in self._processes.items()}
        now = time.monotonic()
        awaited = {n: records.version(self._folder, n) for n in await_from}
        for number in ask:
            if number not in self._processes:
                awaited.pop(number, None)
                continue  # It failed and stays, and was asked then.
            process, usage = self._processes[number], self._before[number]
            if usage is None or usage.state == "Z":
                continue  # It is about to end, and that is an answer.
            # SIGUSR1 would end one that does not know it.
            if usage.state in _ANSWERING and process.catches(signal.SIGUSR1):
                process.send(signal.SIGUSR1)
            else:
                awaited.pop(number, None)
        least = min(_LEAST_SECONDS, most_seconds)
        return Inquiry(awaited, now + least, now + most_seconds)

    def has_answered(self, inquiry: Inquiry, running: Collection[int]) -> bool:
        """Return whether there is nothing more to wait for."""
        now = time.monotonic()
        for number, before in list(inquiry.awaited.items()):
            if number not in running or (
                records.version(self._folder, number) != before
            ):
                del inquiry.awaited[number]
        return now >= inquiry.most or (now >= inquiry.least and not inquiry.awaited)

    def usages(self) -> dict[int, Usage]:
        """Return what the kernel says of each process, as far as it does."""
        found = {n: process.usage() for n, process in self._processes.items()}
        return {n: usage for n, usage in found.items() if usage is not None}

    def seen(self) -> list[Seen]:
        """Return what it has seen of each process, and of ends on other hosts."""
        found = []
        for number in sorted({*self._processes, *self._order}):
            process, before = self._processes.get(number), self._before.get(number)
            usage = process.usage() if process else None
            works = None
            if usage and before and usage.time > before.time:
                share = (usage.cpu - before.cpu) / (usage.time - before.time)
                works = share >= _WORKS_FROM
            found.append(
                Seen(
                    process=number,
                    pid=process.pid if process else 0,
                    host=self._host if process else "",
                    status=self._status.get(number),
                    order=self._order.get(number, 0),
                    was_given_up=number in self._given_up,
                    was_asked=number in self._asked,
                    state=usage.state if usage else "",
                    works=works,
                    call=usage.call if usage else "",
                )
            )
        return found


class Inquiries:
    """What is asked, and what is done once that is answered.

    Args:
      witness: asks.
      running: by number, without those that have ended.
    """

    def __init__(self, witness: Witness, running: Mapping[int, Process]):
        self._witness = witness
        self._running = running
        self._open: list[tuple[Inquiry, Callable[[], None]]] = []

    def __len__(self):
        return len(self._open)

    def add(
        self,
        ask: Collection[int],
        await_from: Collection[int],
        most_seconds: float,
        then: Callable[[], None],
    ) -> None:
        """Ask those of some processes that run, and act after their answers."""
        ask, await_from = (
            [number for number in some if number in self._running]
            for some in (ask, await_from)
        )
        inquiry = self._witness.ask(ask, await_from, most_seconds)
        self._open.append((inquiry, then))

    def take_answers(self) -> None:
        """Act after those that are answered, or late."""
        for each in list(self._open):
            inquiry, then = each
            if self._witness.has_answered(inquiry, self._running):
                self._open.remove(each)
                then()
