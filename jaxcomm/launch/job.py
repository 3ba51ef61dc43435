"""Watch the processes, and stop all of them when one fails or someone asks."""

import collections
import contextlib
import dataclasses
import math
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Collection, Sequence

from jaxcomm.diagnostics.seen import describe
from jaxcomm.launch.ends import Ends
from jaxcomm.launch.options import Options
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import UNKILLABLE_SECONDS, Process
from jaxcomm.launch.report import Report
from jaxcomm.launch.signals import Signals
from jaxcomm.launch.watch import CpuWatch, NcclWatch
from jaxcomm.launch.witness import PATIENCE_SECONDS, Inquiry, Witness

# As timeout(1) has it.
TIMED_OUT = 124
# As argparse and Python itself end.
WRONG_USE = 2
# A process that waits for a dead one says so within 0.2 s, in a
# traceback that is worth more than the fact that it was stopped.
_LAST_WORDS_SECONDS = 1.0
# To write a flight record takes some milliseconds.
_INSISTENT_SECONDS = 0.2
# For the kernel to end a process that was given up and killed: the others wait for it.
_KILLED_SECONDS = 1.0
# Between looks at processes whose end wakes nobody.
_LOOK_SECONDS = 0.1
SIGNAL_BASE = 128
# Between looks at records that are to come.
_ANSWER_SECONDS = 0.02
# A process that is stopped for so long is lost, if no other one watches it.
_STOPPED_SECONDS = 5.0
# Survivors wait for the end of one that they gave up.
_LAST_PATIENCE_SECONDS = 0.6
# What a process reports, see child.py: its number, then its status, that all have
# joined, that its program ended well, or a process that it and others go on without.
_REPORT = re.compile(
    rb"([0-9]{1,7}) (?:([0-9]{1,3})|(ready|done)|gave-up ([0-9]{1,7}))"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A way to make processes end, and the seconds it is given."""

    signal_number: int
    seconds: float


def _steps(first: int, grace: float) -> list[Step]:
    """Return what is tried one after the other, from ``first`` on."""
    polite = [first] if first == signal.SIGTERM else [first, signal.SIGTERM]
    last = Step(signal.SIGKILL, UNKILLABLE_SECONDS)
    return [*(Step(number, grace) for number in polite), last]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
      status: of the first process that failed. If none did, 0, or what the request to
        end makes of it.
      failed: the process that failed first. If None, none did before the end was asked
        for.
      was_asked: whether a signal, ``--timeout`` or a closed output asked for the end.
      left: of an elastic job that failed before its processes had joined: those that
        did not fail by themselves.
    """

    status: int
    failed: int | None = None
    was_asked: bool = False
    left: tuple[int, ...] = ()


class Job:
    """The processes of an attempt.

    Args:
      processes: just started.
      reports: reading end of the pipe on which they report failures.
      options: the times allowed.
      end: ``time.monotonic()`` at which ``--timeout`` ends the run.
      signals: those that reach the launcher.
      output: for messages.
      ends: where those of all processes are told.
      witness: what is seen of processes.
      report: says who is to blame.
      watch: of progress. If None, nobody asked for it.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        reports: int,
        options: Options,
        end: float,
        signals: Signals,
        output: Output,
        ends: Ends,
        witness: Witness,
        report: Report,
        watch: NcclWatch | CpuWatch | None = None,
    ):
        self._running = {process.number: process for process in processes}
        # Of elastic jobs: how many have to live, who does, and whether they have met.
        self._least = options.min_processes if options.elastic else None
        self._living = {*range(options.total)}
        self._is_ready = False
        self._ends = ends
        self._witness = witness
        self._report = report
        # Whose programs have ended well, and since when others have been stopped.
        self._done: set[int] = set()
        self._stopped: dict[int, float] = {}
        self._watch = watch
        self._restarts = options.max_restarts > 0
        # What is asked, and what is done once that is answered.
        self._inquiries: list[tuple[Inquiry, Callable[[], None]]] = []
        self._all = dict(self._running)
        self._reports = reports
        self._grace = options.grace
        self._timeout = options.timeout
        self._signals = signals
        self._output = output
        self._steps: collections.deque[Step] = collections.deque()
        self._deadline = end
        self._stopping = False
        self._has_ended_some = False
        self._insisted = 0
        self._request = 0
        self._failed: int | None = None
        self._is_late = False
        # Given up and killed: until when the kernel has time to end them.
        self._killed: dict[int, float] = {}
        # Whether those that still run have been killed, in vain.
        self._is_over = False
        self._status: int | None = None

    def wait(self) -> Outcome:
        """Wait until all have ended."""
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._signals, selectors.EVENT_READ, self._heed)
            selector.register(self._reports, selectors.EVENT_READ, self._read_reports)
            if self._ends.is_of_many_hosts:
                selector.register(self._ends, selectors.EVENT_READ, self._read_ends)
            unwatched = []
            for process in self._running.values():
                if watch := stack.enter_context(process.watched()):
                    selector.register(watch, selectors.EVENT_READ, process)
                else:
                    unwatched.append(process)
            while (self._running or self._inquiries) and not self._is_over:
                left = min([self._deadline, *self._killed.values()]) - time.monotonic()
                if self._watch is not None and not self._stopping:
                    left = min(left, self._watch.left())
                if self._inquiries:
                    left = min(left, _ANSWER_SECONDS)
                if unwatched or self._is_alone_in_watching():
                    left = min(left, _LOOK_SECONDS)
                # Epoll gives them in the order in which they happened, so the first
                # failure comes first though we come late.
                for key, _ in selector.select(
                    None if left == math.inf else max(left, 0)
                ):
                    if isinstance(key.data, Process):
                        selector.unregister(key.fileobj)
                        self._collect(key.data)
                        if key.data.number in self._running:
                            # A debugger has yet to let go of it.
                            unwatched.append(key.data)
                    else:
                        key.data()
                # Not the others: theirs is an order of failures.
                for process in unwatched:
                    self._collect(process)
                unwatched = [p for p in unwatched if p.number in self._running]
                self._take_answers()
                self._leave_behind()
                if self._is_alone_in_watching():
                    self._give_up_stopped()
                self._look_for_progress()
                if time.monotonic() >= self._deadline:
                    self._time_is_up()
        self._read_reports()
        has_joined = self._is_ready or self._ends.is_of_many_hosts
        may_join = self._least is not None and not has_joined and self._status
        return Outcome(
            self._status or 0,
            self._failed,
            was_asked=bool(self._request) or self._is_late,
            left=tuple(sorted(self._living)) if may_join else (),
        )

    def _heed(self):
        for number in self._signals.take():
            if number == signal.SIGUSR1:
                self._ask_for_records()
                continue
            self._request = self._request or number
            if self._stopping:
                self._insisted += 1
                # Twice: whatever has been tried by now, there is no more to wait for.
                while self._insisted > 1 and len(self._steps) > 1:
                    self._steps.popleft()
                if not self._inquiries:
                    self._next_step(_INSISTENT_SECONDS)
                continue
            name = signal.Signals(number).name
            self._output.say(f"{name}: passed on to the processes; again, to insist")
            first, *rest = _steps(number, self._grace)
            # Whoever hangs says at what before anything worse comes.
            last_words = Step(signal.SIGUSR1, min(_LAST_WORDS_SECONDS, self._grace / 2))
            first = Step(first.signal_number, self._grace - last_words.seconds)
            self._stop([first, last_words, *rest])

    def _collect(self, process):
        if process.number not in self._running or not process.has_ended():
            return
        self._count_off(process)

    def _leave_behind(self):
        """Go on without those whom the kernel does not end, though they are killed.

        They wait in it, for a device or a file system, and run no instruction any more.
        """
        for number, end in [*self._killed.items()]:
            process = self._running.get(number)
            if process is None:
                del self._killed[number]
            elif time.monotonic() >= end:
                self._output.say(
                    f"process {number} is killed, and the kernel does not end it: "
                    f"left behind in state {process.state()}, with its GPUs if any"
                )
                process.leave_behind()
                self._count_off(process)

    def _count_off(self, process):
        self._running.pop(process.number)
        self._killed.pop(process.number, None)
        self._ends.tell(process.number, process.status)
        if process.status:
            self._fail(process.number, process.status)
        if self._running and not self._stopping and not self._living & {*self._running}:
            # What is left of it was given up, and the job is done.
            self._stop(_steps(signal.SIGTERM, self._grace))

    def _read_reports(self):
        try:
            lines = os.read(self._reports, 1 << 16).split(b"\n")
        except BlockingIOError:
            return
        for form in filter(None, map(_REPORT.fullmatch, lines)):
            number, status, ready, given_up = form.groups()
            if ready == b"ready":
                self._is_ready = True
            elif ready:
                self._done.add(int(number))
                self._witness.note(int(number), 0)
            elif status:
                self._fail(int(number), int(status))
                if not self._inquiries:
                    self._all[int(number)].release()
            elif self._give_up(int(given_up)):
                self._ends.tell_given_up(int(given_up))

    def _read_ends(self):
        found, given_up = self._ends.take()
        for number in given_up:
            self._give_up(number)
        for number, status, how in found:
            if status:
                self._fail(number, status, how)
        if self._ends.refusal and self._status is None:
            self._status = WRONG_USE
            self._output.say(
                f"{self._ends.refusal}; stopping. Give all hosts the same --hosts and "
                "-n, and each a --host of its own"
            )
            self._stop(_steps(signal.SIGTERM, self._grace))
        if self._ends.is_cut_off and self._status is None:
            self._status = SIGNAL_BASE + signal.SIGKILL
            self._blame_then_stop(
                "host 0, which served jax.distributed, is lost; stopping"
            )

    def _give_up(self, number) -> bool:
        """End a process that the others go on without; return whether that is news.

        It may be stopped, or wait in the kernel, and it must write nothing any more.
        """
        if self._least is None or number not in self._living:
            return False
        how = "was given up by the others"
        self._fail(number, SIGNAL_BASE + signal.SIGKILL, how, is_given_up=True)
        return True

    def _is_alone_in_watching(self) -> bool:
        """Return whether perhaps no process misses another one of an elastic job.

        They wait for all to join, or the last ones are about to end.
        """
        if self._least is None or self._stopping or self._inquiries:
            return False
        have_ended_some = bool(self._done) or len(self._running) < len(self._all)
        return not self._is_ready or have_ended_some

    def _give_up_stopped(self):
        """End those that have been stopped for long: nobody else would."""
        now = time.monotonic()
        stopped = {n for n, p in self._running.items() if p.state() == "T"}
        self._stopped = {n: self._stopped.get(n, now) for n in stopped}
        others = self._running.keys() - stopped
        if self._is_ready and not others <= self._done:
            return
        for number, since in self._stopped.items():
            if now - since >= _STOPPED_SECONDS and number in self._living:
                how = "was stopped, and given up"
                status = SIGNAL_BASE + signal.SIGKILL
                self._fail(number, status, how, is_given_up=True)
                return

    def _end_given_up(self, number):
        if number in self._running:
            self._running[number].send_all(signal.SIGKILL)
            self._killed[number] = time.monotonic() + _KILLED_SECONDS

    def _fail(self, number, status, how="", is_given_up=False):
        if number not in self._living:
            return
        how = how or describe(status)
        if not self._stopping:
            self._witness.note(number, status, is_given_up)
        if self._least is not None and not self._has_ended_some:
            self._living.discard(number)
        if self._status is not None:
            return
        if self._least is not None and self._is_ready and not self._stopping:
            count = len(self._living)
            if count >= self._least:
                rest = f"{count} others go on" if count > 1 else "1 other goes on"
                # The others write their records by themselves, where they fail.
                most = _LAST_PATIENCE_SECONDS
                awaited = [number] if is_given_up else self._running
                self._inquire(
                    [number],
                    awaited,
                    most,
                    lambda: self._go_on(
                        number, f"process {number} {how}; {rest}", is_given_up
                    ),
                )
                return
        self._status = status
        if self._stopping:
            return
        self._failed = number
        others = "; stopping the others" if set(self._running) - {number} else ""
        self._blame_then_stop(f"process {number} {how}{others}")

    def _inquire(
        self,
        ask: Collection[int],
        await_from: Collection[int],
        most_seconds: float,
        then: Callable[[], None],
    ):
        """Ask those of some processes that run, and act after their answers."""
        ask, await_from = (
            [number for number in some if number in self._running]
            for some in (ask, await_from)
        )
        inquiry = self._witness.ask(ask, await_from, most_seconds)
        self._inquiries.append((inquiry, then))

    def _take_answers(self):
        for each in list(self._inquiries):
            inquiry, then = each
            if self._witness.has_answered(inquiry, self._running):
                self._inquiries.remove(each)
                then()

    def _go_on(self, number, text, is_given_up):
        self._report.blame(self._witness.seen())
        self._witness.forget(number)
        self._output.say(text)
        if number in self._all:
            self._all[number].release()
        if is_given_up:
            self._end_given_up(number)

    def _time_is_up(self):
        if self._stopping and not self._steps:
            self._is_over = True
            who = ", ".join(map(str, sorted(self._running)))
            self._output.say(f"killed, but the kernel does not end them: {who}")
            return
        if self._stopping:
            self._next_step()
            return
        self._status = TIMED_OUT
        self._is_late = True
        text = f"--timeout: not done after {self._timeout:g} s; stopping"
        self._blame_then_stop(text)

    def _look_for_progress(self):
        if self._watch is None or self._stopping:
            return
        held = self._watch.look(self._witness)
        if held is None:
            return
        text = f"--watch: no progress for {self._watch.seconds:g} s"
        text += f": {held.how}" if held.how else ""
        if self._restarts and not held.may_go_on:
            self._status = TIMED_OUT
            self._failed = held.process
            self._blame_then_stop(f"{text}; stopping", held.still)
            return
        see = "" if self._restarts else ", see --max-restarts"

        def tell():
            self._report.blame(self._witness.seen(), held.still)
            self._output.say(f"{text}; it goes on{see}")

        self._inquire(
            self._running, self._running, min(PATIENCE_SECONDS, self._grace), tell
        )

    def _blame_then_stop(self, text, idle=frozenset()):
        """Say who is to blame, then a line, and stop all."""
        self._stopping = True
        # Each wait for an answer has an end of its own.
        self._deadline = math.inf

        def stop():
            if self._status != WRONG_USE:
                self._report.blame(self._witness.seen(), idle)
            if text:
                self._output.say(text)
            for process in self._all.values():
                process.release()
            last_words = Step(0, min(_LAST_WORDS_SECONDS, self._grace))
            self._stop([last_words, *_steps(signal.SIGTERM, self._grace)])

        most = min(PATIENCE_SECONDS, self._grace)
        self._inquire(self._running, self._running, most, stop)

    def _stop(self, steps):
        self._stopping = True
        self._steps.extend(steps)
        self._next_step()

    def _next_step(self, most_seconds_for_words=math.inf):
        if not self._steps:
            return
        step = self._steps.popleft()
        seconds = step.seconds
        if step.signal_number == signal.SIGUSR1:
            seconds = min(seconds, most_seconds_for_words)
        self._deadline = time.monotonic() + seconds
        if step.signal_number == signal.SIGKILL:
            if self._status is None and self._request:
                self._status = SIGNAL_BASE + self._request
            who = ", ".join(map(str, sorted(self._running)))
            self._output.say(f"still running, now killed: {who}")
        if step.signal_number == signal.SIGUSR1:
            self._ask_for_records()
        # Without a signal it is time for what they say by themselves.
        if step.signal_number in (signal.SIGUSR1, 0):
            return
        self._has_ended_some = True
        # Process 0 last: JAX ends the others, with pages of text, when they lose it.
        for process in reversed(self._running.values()):
            process.send_all(step.signal_number)

    def _ask_for_records(self):
        for process in self._running.values():
            # It would end one that does not know it.
            if process.catches(signal.SIGUSR1):
                process.send(signal.SIGUSR1)
