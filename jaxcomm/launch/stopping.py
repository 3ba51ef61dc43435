"""How processes are made to end: signals one after the other, each with its time."""

import collections
import dataclasses
import math
import signal
import time
from collections.abc import Iterable, Mapping

from jaxcomm.launch.output import Output
from jaxcomm.launch.process import UNKILLABLE_SECONDS, Process

# A process that waits for a dead one says so within 0.2 s, in a
# traceback that is worth more than the fact that it was stopped.
_LAST_WORDS_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A way to make processes end, and the seconds it is given."""

    signal_number: int
    seconds: float


def steps(first: int, grace: float) -> list[Step]:
    """Return what is tried one after the other, from ``first`` on."""
    polite = [first] if first == signal.SIGTERM else [first, signal.SIGTERM]
    last = Step(signal.SIGKILL, UNKILLABLE_SECONDS)
    return [*(Step(number, grace) for number in polite), last]


def steps_of_request(number: int, grace: float) -> list[Step]:
    """Return what is tried after a signal to the launcher."""
    first, *rest = steps(number, grace)
    # Whoever hangs says at what before anything worse comes.
    last_words = Step(signal.SIGUSR1, min(_LAST_WORDS_SECONDS, grace / 2))
    first = Step(first.signal_number, grace - last_words.seconds)
    return [first, last_words, *rest]


def steps_of_failure(grace: float) -> list[Step]:
    """Return what is tried after the end of a process that the others need."""
    # Without a signal they may say what they know.
    last_words = Step(0, min(_LAST_WORDS_SECONDS, grace))
    return [last_words, *steps(signal.SIGTERM, grace)]


def ask_for_records(processes: Iterable[Process]) -> None:
    """Have those that can write their flight records."""
    for process in processes:
        # It would end one that does not know it.
        if process.catches(signal.SIGUSR1):
            process.send(signal.SIGUSR1)


class Stopping:
    """The end of those that run.

    Args:
      running: by number, without those that have ended.
      output: for messages.
      end: ``time.monotonic()`` at which ``--timeout`` ends the run.

    Attributes:
      has_begun: whether an end was decided.
      deadline: when to go on, by ``time.monotonic()``.
      has_ended_some: whether a signal was sent that ends processes.
    """

    def __init__(self, running: Mapping[int, Process], output: Output, end: float):
        self.has_begun = False
        self.deadline = end
        self.has_ended_some = False
        self._running = running
        self._output = output
        self._steps: collections.deque[Step] = collections.deque()

    @property
    def is_at_its_end(self) -> bool:
        """Whether all has been tried."""
        return not self._steps

    @property
    def is_to_kill(self) -> bool:
        """Whether the next step is to kill them."""
        return bool(self._steps) and self._steps[0].signal_number == signal.SIGKILL

    def begin(self) -> None:
        """Decide that all end, once something else is done."""
        self.has_begun = True
        # Each wait for an answer has an end of its own.
        self.deadline = math.inf

    def add(self, more: Iterable[Step]) -> None:
        """Try some steps after those that are left."""
        self.has_begun = True
        self._steps.extend(more)

    def skip_to_the_last(self) -> None:
        """Leave out all but the last step: there is no more to wait for."""
        while len(self._steps) > 1:
            self._steps.popleft()

    def go_on(self, most_seconds_for_words: float = math.inf) -> Step | None:
        """Take the next step; return it, None if there is none."""
        if not self._steps:
            return None
        step = self._steps.popleft()
        seconds = step.seconds
        if step.signal_number == signal.SIGUSR1:
            seconds = min(seconds, most_seconds_for_words)
            ask_for_records(self._running.values())
        self.deadline = time.monotonic() + seconds
        if step.signal_number == signal.SIGKILL:
            who = ", ".join(map(str, sorted(self._running)))
            self._output.say(f"still running, now killed: {who}")
        # Without a signal it is time for what they say by themselves.
        if step.signal_number not in (signal.SIGUSR1, 0):
            self.has_ended_some = True
            # Process 0 last: JAX ends the others, with pages of text, if it is lost.
            for process in reversed([*self._running.values()]):
                process.send_all(step.signal_number)
        return step
