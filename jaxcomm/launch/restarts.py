"""Whether a job that failed starts again, and with which processes."""

import collections
import dataclasses
import uuid

from jaxcomm.launch.job import SIGNAL_BASE, Outcome, describe
from jaxcomm.launch.options import Options

# As argparse and Python itself end.
_WRONG_USE = 2
# The first may have met what the attempt before it left, such as GPU memory.
_FAILURES_OF_A_SLOT = 2


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the job.

    Attributes:
      restarts: how many were before it.
      slots: what its processes run on, one each, in the order of their ids. A slot is a
        number from 0 to ``--processes`` - 1. On GPUs, it stands for the GPUs of the
        process.
      run_id: names the run, all its attempts.
    """

    restarts: int
    slots: tuple[int, ...]
    run_id: str

    @classmethod
    def first(cls, options: Options) -> "Attempt":
        """Return the first attempt of a run: one process on each slot."""
        return cls(0, tuple(range(options.processes)), uuid.uuid4().hex)


class Restarts:
    """Counts the restarts of a run, and chooses the slots of the next attempt.

    Attributes:
      attempt: the present one.
    """

    def __init__(self, options: Options):
        self.attempt = Attempt.first(options)
        self._most = options.max_restarts
        self._fewest = options.min_processes or options.processes
        self._all = options.processes
        # By slot, since the job was up.
        self._failures_at_start = collections.Counter()

    def after(self, outcome: Outcome) -> str:
        """Choose the next attempt, if there is to be one; return what to say.

        ``attempt`` is another one afterwards, or the same if the run is over.
        """
        count = self.attempt.restarts
        if count and not outcome.status:
            return f"done after {count} restart{'s' if count > 1 else ''}"
        if not self._most or not outcome.status or outcome.was_asked:
            return ""
        assert outcome.failed is not None  # the status is not 0
        cause = f"process {outcome.failed} {describe(outcome.status)}"
        if outcome.status == _WRONG_USE:
            return (
                f"not restarted: {cause}, which says that the program was called "
                "wrongly. Correct the call"
            )
        if not count and not outcome.was_up and outcome.status <= SIGNAL_BASE:
            return (
                f"not restarted: {cause} before all processes had started their "
                "devices, in the first attempt. It would do so again: correct the "
                "program"
            )
        if count == self._most:
            return f"not restarted: {cause}, after all {self._most} restarts"
        left_out = self._leave_out(self.attempt.slots[outcome.failed], outcome.was_up)
        slots = tuple(slot for slot in self.attempt.slots if slot != left_out)
        self.attempt = dataclasses.replace(
            self.attempt, restarts=count + 1, slots=slots
        )
        text = f"restart {count + 1} of {self._most}: {cause}"
        if left_out is not None:
            text += (
                f". Slot {left_out} failed {_FAILURES_OF_A_SLOT} times at the start "
                f"and is left out: {len(slots)} of {self._all} processes go on"
            )
        return text

    def _leave_out(self, slot: int, was_up: bool) -> int | None:
        """Return the slot if it is to be left out from now on."""
        if was_up:
            self._failures_at_start.clear()
            return None
        self._failures_at_start[slot] += 1
        if (
            self._failures_at_start[slot] < _FAILURES_OF_A_SLOT
            or len(self.attempt.slots) <= self._fewest
        ):
            return None
        # Without it, the other processes have other ids and another coordinator.
        self._failures_at_start.clear()
        return slot
