"""Who is part of an elastic job: lost, given up, and started again."""

import collections
import signal
import time
from collections.abc import Callable, Iterator, Mapping

from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process

# For the kernel to end a process that was given up and killed: the others wait for it.
_KILLED_SECONDS = 1.0
# A process that is stopped for so long is lost, if no other one watches it.
_STOPPED_SECONDS = 5.0


class Members:
    """The processes of an attempt, as the others need them.

    Args:
      options: what was asked for.
      running: of this host, by number, without those that have ended.
      start: starts a process: its number, and how often it was started again.
      output: for messages.

    Attributes:
      is_elastic: whether others go on.
      is_ready: whether all have met.
      living: those, of all hosts, that the others have not lost.
      done: those whose programs have ended well.
    """

    def __init__(
        self,
        options: Options,
        running: Mapping[int, Process],
        start: Callable[[int, int], Process],
        output: Output,
    ):
        self.is_elastic = options.elastic
        self.is_ready = False
        self.living = {*range(options.total)}
        self.done: set[int] = set()
        self._least = options.min_processes
        self._running = running
        self._start = start
        self._output = output
        self._all = len(running)
        # Given up and killed: until when the kernel has time to end them.
        self._killed: dict[int, float] = {}
        # Given up, each with how often it had been started again.
        self._given_up: set[tuple[int, int]] = set()
        # Since when others have been stopped.
        self._stopped: dict[int, float] = {}
        # How often each was started again, and how often any may be.
        self._starts: collections.Counter[int] = collections.Counter()
        self._starts_left = options.rejoin
        self._to_start: set[int] = set()
        # Started again, and not yet taken in.
        self._waiting: set[int] = set()

    def can_go_on(self) -> bool:
        """Return whether enough live, and have met."""
        return self.is_elastic and self.is_ready and len(self.living) >= self._least

    def deadline(self) -> float:
        """Return when a killed process is left behind, at the soonest."""
        return min(self._killed.values(), default=float("inf"))

    def give_up(self, number: int, starts: int) -> bool:
        """Note that the others gave up a process; return whether that is news.

        Each of the others says so, perhaps after the process was started again.

        Args:
          number: of the process.
          starts: how often the one that they gave up had been started again.
        """
        if starts != self._starts[number] or (number, starts) in self._given_up:
            return False
        self._given_up.add((number, starts))
        return True

    def end_given_up(self, number: int) -> None:
        """End a process that the others go on without."""
        if number in self._running:
            self._running[number].send_all(signal.SIGKILL)
            self._killed[number] = time.monotonic() + _KILLED_SECONDS

    def has_ended(self, number: int) -> None:
        """Wait no more for the kernel to end a process."""
        self._killed.pop(number, None)

    def left_behind(self) -> Iterator[Process]:
        """Yield those whom the kernel does not end, though they are killed.

        They wait in it, for a device or a file system, and run no instruction any more.
        """
        for number, end in [*self._killed.items()]:
            process = self._running[number]
            if time.monotonic() >= end:
                self._to_start.discard(number)  # It still holds its GPUs.
                self._output.say(
                    f"process {number} is killed, and the kernel does not end it: "
                    f"left behind in state {process.state()}, with its GPUs if any"
                )
                process.leave_behind()
                yield process

    def are_alone_in_watching(self) -> bool:
        """Return whether perhaps no process misses another one of an elastic job.

        They wait for all to join, or the last ones are about to end.
        """
        have_ended_some = bool(self.done) or len(self._running) < self._all
        return self.is_elastic and (not self.is_ready or have_ended_some)

    def stopped_for_long(self) -> int | None:
        """Return a process that has been stopped for long, and that nobody misses."""
        now = time.monotonic()
        stopped = {n for n, p in self._running.items() if p.state() == "T"}
        self._stopped = {n: self._stopped.get(n, now) for n in stopped}
        others = self._running.keys() - stopped
        if self.is_ready and not others <= self.done:
            return None
        for number, since in self._stopped.items():
            if now - since >= _STOPPED_SECONDS and number in self.living:
                return number
        return None

    def start_again(self, number: int) -> None:
        """Start a lost process again once it has ended, if it may be."""
        if self._starts_left and number not in self._to_start:
            self._starts_left -= 1
            self._to_start.add(number)

    def started_again(self) -> Iterator[Process]:
        """Start those that are to be; yield them."""
        for number in sorted(self._to_start - self._running.keys()):
            self._to_start.remove(number)
            if self.living & self._running.keys() <= self.done:
                continue  # Nobody is left to take it in.
            self._starts[number] += 1
            self._waiting.add(number)
            process = self._start(number, self._starts[number])
            self._output.say(
                f"process {number} is started again, for the others to take in"
            )
            yield process

    def has_joined(self, number: int) -> None:
        """Miss a process that the others have taken in."""
        if number in self._waiting:
            self._waiting.remove(number)
            self.living.add(number)

    def lose_again(self, number: int) -> bool:
        """Return whether a process waited to be taken in, and waits no more."""
        if number not in self._waiting:
            return False
        self._waiting.remove(number)
        self.start_again(number)
        return True
