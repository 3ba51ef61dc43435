"""Watch the processes, and stop all of them when one fails or someone asks."""

import contextlib
import math
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from jaxcomm.diagnostics.seen import describe
from jaxcomm.launch.ends import Ends
from jaxcomm.launch.members import Members
from jaxcomm.launch.options import Options
from jaxcomm.launch.outcome import SIGNAL_BASE, TIMED_OUT, WRONG_USE, Outcome
from jaxcomm.launch.output import Output
from jaxcomm.launch.process import Process
from jaxcomm.launch.report import Report
from jaxcomm.launch.signals import Signals
from jaxcomm.launch.stopping import (
    Stopping,
    ask_for_records,
    steps,
    steps_of_failure,
    steps_of_request,
)
from jaxcomm.launch.watch import CpuWatch, NcclWatch
from jaxcomm.launch.witness import ANSWER_SECONDS, PATIENCE_SECONDS, Inquiries, Witness

# To write a flight record takes some milliseconds.
_INSISTENT_SECONDS = 0.2
# Between looks at processes whose end wakes nobody.
_LOOK_SECONDS = 0.1
# Survivors wait for the end of one that they gave up.
_LAST_PATIENCE_SECONDS = 0.6
# What a process reports, see child.py: its number, then its status, that all have
# joined, that the others took it in, that its program ended well, or a process that it
# and others go on without, with how often that one had been started again.
_REPORT = re.compile(
    rb"([0-9]{1,7}) (?:([0-9]{1,3})|(ready|joined|done)"
    rb"|gave-up ([0-9]{1,7}) ([0-9]{1,5}))"
)


class Job:
    """The processes of an attempt.

    Args:
      processes: just started.
      start: starts one again, see members.py.
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
        start: Callable[[int, int], Process],
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
        self._members = Members(options, self._running, start, output)
        self._stopping = Stopping(self._running, output, end)
        self._ends = ends
        self._witness = witness
        self._report = report
        self._watch = watch
        self._restarts = options.max_restarts > 0
        self._inquiries = Inquiries(witness, self._running)
        self._all = dict(self._running)
        self._reports = reports
        self._grace = options.grace
        self._timeout = options.timeout
        self._signals = signals
        self._output = output
        self._insisted = 0
        self._request = 0
        self._failed: int | None = None
        self._is_late = False
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

            def look_after(process):
                if watch := stack.enter_context(process.watched()):
                    selector.register(watch, selectors.EVENT_READ, process)
                else:
                    unwatched.append(process)

            for process in self._running.values():
                look_after(process)
            while (self._running or self._inquiries) and not self._is_over:
                left = min(self._stopping.deadline, self._members.deadline())
                left -= time.monotonic()
                if self._watch is not None and not self._stopping.has_begun:
                    left = min(left, self._watch.left())
                if self._inquiries:
                    left = min(left, ANSWER_SECONDS)
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
                unwatched[:] = [p for p in unwatched if p.number in self._running]
                self._inquiries.take_answers()
                for process in self._members.left_behind():
                    self._count_off(process)
                if self._is_alone_in_watching():
                    self._give_up_stopped()
                for process in self._started_again():
                    look_after(process)
                self._look_for_progress()
                if time.monotonic() >= self._stopping.deadline:
                    self._time_is_up()
        self._read_reports()
        members = self._members
        has_joined = members.is_ready or self._ends.is_of_many_hosts
        may_join = members.is_elastic and not has_joined and self._status
        return Outcome(
            self._status or 0,
            self._failed,
            was_asked=bool(self._request) or self._is_late,
            left=tuple(sorted(members.living)) if may_join else (),
        )

    def _heed(self):
        for number in self._signals.take():
            if number == signal.SIGUSR1:
                ask_for_records(self._running.values())
                continue
            self._request = self._request or number
            if self._stopping.has_begun:
                self._insisted += 1
                if self._insisted > 1:
                    self._stopping.skip_to_the_last()
                if not self._inquiries:
                    self._go_on_stopping(_INSISTENT_SECONDS)
                continue
            name = signal.Signals(number).name
            self._output.say(f"{name}: passed on to the processes; again, to insist")
            self._witness.note_request(self._running)
            self._stop(steps_of_request(number, self._grace))

    def _collect(self, process):
        if process.number not in self._running or not process.has_ended():
            return
        self._count_off(process)

    def _count_off(self, process):
        self._running.pop(process.number)
        self._members.has_ended(process.number)
        self._ends.tell(process.number, process.status)
        if process.status:
            self._fail(process.number, process.status)
        is_over = not self._members.living & self._running.keys()
        if self._running and not self._stopping.has_begun and is_over:
            # What is left of it was given up, and the job is done.
            self._stop(steps(signal.SIGTERM, self._grace))

    def _read_reports(self):
        try:
            lines = os.read(self._reports, 1 << 16).split(b"\n")
        except BlockingIOError:
            return
        for form in filter(None, map(_REPORT.fullmatch, lines)):
            number, status, news, given_up, starts = form.groups()
            if news == b"ready":
                self._members.is_ready = True
            elif news == b"joined":
                self._members.has_joined(int(number))
            elif news:
                self._members.done.add(int(number))
                self._witness.note(int(number), 0)
            elif status:
                self._fail(int(number), int(status))
                if not self._inquiries:
                    self._all[int(number)].release()
            elif self._give_up(int(given_up), int(starts)):
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
            self._stop(steps(signal.SIGTERM, self._grace))
        if self._ends.is_cut_off and self._status is None:
            self._status = SIGNAL_BASE + signal.SIGKILL
            self._blame_then_stop(
                "host 0, which served jax.distributed, is lost; stopping"
            )

    def _give_up(self, number, starts=0) -> bool:
        """End a process that the others go on without; return whether it was living.

        It may be stopped, or wait in the kernel, and it must write nothing any more.
        Its program may have failed before, or it may wait to be taken in.
        """
        members = self._members
        if not members.is_elastic or not members.give_up(number, starts):
            return False
        was_living = number in members.living
        how = "was given up by the others"
        self._fail(number, SIGNAL_BASE + signal.SIGKILL, how, is_given_up=True)
        stays = number in self._running and not self._stopping.has_begun
        if not was_living and stays:
            # First it answers, perhaps a question of before, too.
            self._inquiries.add(
                [number],
                [number],
                _LAST_PATIENCE_SECONDS,
                lambda: members.end_given_up(number),
            )
        return was_living

    def _is_alone_in_watching(self) -> bool:
        """Return whether perhaps nobody else sees that a process is stopped."""
        is_busy = self._stopping.has_begun or self._inquiries
        return not is_busy and self._members.are_alone_in_watching()

    def _give_up_stopped(self):
        """End one that has been stopped for long: nobody else would."""
        number = self._members.stopped_for_long()
        if number is not None:
            how = "was stopped, and given up"
            status = SIGNAL_BASE + signal.SIGKILL
            self._fail(number, status, how, is_given_up=True)

    def _started_again(self):
        """Start lost processes again, and return them."""
        if self._stopping.has_begun or self._inquiries:
            return []
        started = [*self._members.started_again()]
        for process in started:
            self._running[process.number] = self._all[process.number] = process
            self._witness.look_at(process)
        if started and self._output.piped:
            self._output.follow({p.number: p.pipes() for p in started})
        return started

    def _fail(self, number, status, how="", is_given_up=False):
        members, stopping = self._members, self._stopping
        how = how or describe(status)
        if number not in members.living:
            if not stopping.has_begun and members.lose_again(number):
                self._output.say(f"process {number} {how} before it was taken in")
                self._all[number].release()
            return
        # Also after the first failure: a killed process with a GPU takes a while to
        # end, and those that saw it die are quicker.
        if not stopping.has_ended_some:
            self._witness.note(number, status, is_given_up)
        if members.is_elastic and not stopping.has_ended_some:
            members.living.discard(number)
        if self._status is not None:
            return
        if members.can_go_on() and not stopping.has_begun:
            count = len(members.living)
            rest = f"{count} others go on" if count > 1 else "1 other goes on"
            # The others write their records by themselves, where they fail.
            most = _LAST_PATIENCE_SECONDS
            awaited = [number] if is_given_up else self._running
            self._inquiries.add(
                [number],
                awaited,
                most,
                lambda: self._go_on(
                    number, f"process {number} {how}; {rest}", is_given_up
                ),
            )
            return
        self._status = status
        if stopping.has_begun:
            return
        self._failed = number
        others = "; stopping the others" if set(self._running) - {number} else ""
        self._blame_then_stop(f"process {number} {how}{others}")

    def _go_on(self, number, text, is_given_up):
        self._report.blame(self._witness.seen())
        self._witness.forget(number)
        self._output.say(text)
        if number in self._all:
            self._all[number].release()
        if is_given_up:
            self._members.end_given_up(number)
        self._members.start_again(number)

    def _time_is_up(self):
        if self._stopping.has_begun and self._stopping.is_at_its_end:
            self._is_over = True
            who = ", ".join(map(str, sorted(self._running)))
            self._output.say(f"killed, but the kernel does not end them: {who}")
            return
        if self._stopping.has_begun:
            self._go_on_stopping()
            return
        self._status = TIMED_OUT
        self._is_late = True
        text = f"--timeout: not done after {self._timeout:g} s; stopping"
        self._blame_then_stop(text)

    def _look_for_progress(self):
        if self._watch is None or self._stopping.has_begun:
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

        self._inquiries.add(
            self._running, self._running, min(PATIENCE_SECONDS, self._grace), tell
        )

    def _blame_then_stop(self, text, idle=frozenset()):
        """Say who is to blame, then a line, and stop all."""
        self._stopping.begin()

        def stop():
            if self._status != WRONG_USE:
                self._report.blame(self._witness.seen(), idle)
            if text:
                self._output.say(text)
            for process in self._all.values():
                process.release()
            self._stop(steps_of_failure(self._grace))

        most = min(PATIENCE_SECONDS, self._grace)
        self._inquiries.add(self._running, self._running, most, stop)

    def _stop(self, more):
        self._stopping.add(more)
        self._go_on_stopping()

    def _go_on_stopping(self, most_seconds_for_words=math.inf):
        # Before the signal: a process that it ends does not fail by itself.
        if self._stopping.is_to_kill and self._status is None and self._request:
            self._status = SIGNAL_BASE + self._request
        self._stopping.go_on(most_seconds_for_words)
