"""How a job ended."""

import dataclasses

# As timeout(1) has it.
TIMED_OUT = 124
# As argparse and Python itself end.
WRONG_USE = 2
SIGNAL_BASE = 128


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
