"""Who is to blame, and the line that says so.

Evidence is one :class:`Account` of each process. Clues are asked in turn, the stronger
first. Each keeps the processes that it speaks against, if there are any. Who is left at
the end is named; several are equally likely.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.seen import ENDED_STATUS, SIGNAL_BASE, STOPPED, Seen

# A process is slow if others waited so long for it in all, and for this share of the
# time; and nobody was waited for twice as long.
_SLOW_SECONDS = 1.0
_SLOW_SHARE = 0.1
_MOST_WAITS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """What is known of one process.

    Attributes:
      process: its index.
      pid: of the operating system; 0 if unknown.
      host: name of its machine; empty if unknown.
      has_record: whether it left a flight record.
      last: what it completed last, ``"pmean #12"``; empty if nothing is known.
      waits_in: what it waits in, or gave up in, ``"psum #13"``; empty if nothing.
      waited: for so many seconds.
      has_failed: whether a collective failed in it, and it did not go on.
      strayed: what it did where others did something else, as a predicate of it.
      is_missing: whether others wait for it.
      came_last: whether it came so late to a collective that others had given up.
      raised: whether an exception ended it.
      has_left: whether it ended well.
      held_up: seconds that others waited for it in collectives that all completed.
      seen: what its launcher saw.
    """

    process: int
    pid: int = 0
    host: str = ""
    has_record: bool = False
    last: str = ""
    waits_in: str = ""
    waited: float = 0.0
    has_failed: bool = False
    strayed: str = ""
    is_missing: bool = False
    came_last: bool = False
    raised: bool = False
    has_left: bool = False
    held_up: float = 0.0
    seen: Seen | None = None

    @property
    def died(self) -> bool:
        """Whether it failed by itself: no collective did, nor was it asked to end."""
        if self.seen and self.seen.was_asked:
            return False
        status = self.seen.status if self.seen else None
        # The extension ends a process before it writes that the collective failed.
        has_failed = self.has_failed or (status == ENDED_STATUS and self.waits_in)
        return bool(status or self.raised) and not has_failed

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return ((self.seen.status if self.seen else None) or 0) > SIGNAL_BASE

    @property
    def name(self) -> str:
        """``"process 2 (pid 4711, host node7)"``."""
        known = [
            *([f"pid {self.pid}"] if self.pid else []),
            *([f"host {self.host}"] if self.host else []),
        ]
        return f"process {self.process}" + (f" ({', '.join(known)})" if known else "")


Clue = Callable[[Sequence[Account]], list[Account]]


def _that(is_so: Callable[[Account], bool]) -> Clue:
    return lambda accounts: [each for each in accounts if is_so(each)]


def _first_failed(accounts: Sequence[Account]) -> list[Account]:
    """Of those that died, whose end was seen first: it may be why the others died."""
    known = [each for each in accounts if each.seen and not each.seen.was_asked]
    failed = [each for each in known if each.seen and each.seen.order]
    first = min((each.seen.order for each in failed if each.seen), default=0)
    return [each for each in failed if each.seen and each.seen.order == first]


def _seen(is_so: Callable[[Seen], bool]) -> Clue:
    return _that(lambda each: each.seen is not None and is_so(each.seen))


def _died(accounts: Sequence[Account]) -> list[Account]:
    """Of all, those that died. Records may be older than the end of their processes.

    So who was in a collective then, and ended after somebody in whom one had failed,
    ended for the same reason.
    """
    orders = [each.seen.order for each in accounts if each.has_failed and each.seen]
    first = min(filter(None, orders), default=None)

    def is_later(each):
        return first is not None and each.seen and each.seen.order > first

    return [x for x in accounts if x.died and not (x.waits_in and is_later(x))]


# Any of these is a reason to suspect somebody.
_ACCUSING: tuple[Clue, ...] = (
    _that(lambda each: each.died and each.was_killed),
    # An exception elsewhere may be about the process that is stopped.
    _seen(lambda seen: seen.state in STOPPED),
    # Then the call of others fails. One that comes to it later ends by that exception.
    _that(lambda each: bool(each.strayed)),
    _died,
    _seen(lambda seen: seen.was_given_up),
    # Who waits for somebody else is not the first cause.
    _that(lambda each: each.is_missing and not each.waits_in),
    _that(lambda each: each.came_last),
    _that(lambda each: each.is_missing),
)
# These tell suspects apart.
_REFINING: tuple[Clue, ...] = (
    _seen(lambda seen: seen.state == "D"),
    _that(lambda each: each.has_left),
    _seen(lambda seen: seen.works is False),
)


def judge(accounts: Sequence[Account]) -> tuple[Account, ...]:
    """Return the suspects: one, several that are equally likely, or nobody."""
    suspects = list(accounts)
    is_accused = False
    for clue in _ACCUSING:
        if found := clue(suspects):
            suspects, is_accused = found, True
    if not is_accused:
        return tuple(_first_failed(accounts))
    if all(each.died for each in suspects):
        suspects = _first_failed(suspects) or suspects
    elif not all(each.strayed for each in suspects):
        for clue in _REFINING:
            suspects = clue(suspects) or suspects
    return tuple(suspects)


def line(accounts: Sequence[Account], seconds: float = 0.0) -> str:
    """Return the line that names who is to blame; empty if nobody is.

    Args:
      accounts: of all processes.
      seconds: between the first and the last collective on record.
    """
    if suspects := judge(accounts):
        waits = _waits(accounts, suspects)
        how = {each.process: _state(each) for each in suspects}
    elif suspects := _slow(accounts, seconds):
        others = [each for each in accounts if each not in suspects]
        held_up = max(each.held_up for each in suspects)
        waits = f"{_processes(others)} waited {_seconds(held_up)} for it in all"
        how = {each.process: "it is slow" for each in suspects}
    else:
        return ""
    first, *rest = suspects
    text = f"suspect: {first.name}: {_last(first)}; {waits}; {how[first.process]}"
    for each in rest:
        text += f"; equally likely: {each.name}: {_last(each)}, and {how[each.process]}"
    return text


def _slow(accounts, seconds) -> tuple[Account, ...]:
    most = max((each.held_up for each in accounts), default=0.0)
    if most < max(_SLOW_SECONDS, _SLOW_SHARE * seconds):
        return ()
    found = tuple(each for each in accounts if 2 * each.held_up > most)
    return found if len(found) < len(accounts) else ()


def _last(account) -> str:
    if account.last:
        return f"last completed {account.last}"
    return "completed no collective on record"


def _waits(accounts, suspects) -> str:
    """Say in what those wait that are no suspects; or suspects, if nobody else does."""
    found = _waiting([each for each in accounts if each not in suspects])
    clauses = []
    for operation, waiting in list(found.items())[:_MOST_WAITS]:
        waited = _seconds(max(each.waited for each in waiting))
        verb = "wait" if len(waiting) > 1 else "waits"
        clauses.append(f"{_processes(waiting)} {verb} in {operation} for {waited}")
    return " and ".join(clauses) or "nobody else waits in a collective"


def _waiting(accounts) -> dict[str, list[Account]]:
    found = collections.defaultdict(list)
    for each in accounts:
        if each.waits_in:
            found[each.waits_in].append(each)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _state(account) -> str:
    seen = str(account.seen) if account.seen else ""
    if account.strayed:
        does = account.strayed
    elif seen:
        does = seen
    elif account.raised:
        does = "ended by an exception"
    elif account.has_left:
        does = "ended well"
    elif account.waits_in:
        does = f"waits in {account.waits_in} for {_seconds(account.waited)}"
    else:
        does = "is not seen to do anything"
    if account.has_record:
        return f"it {does}"
    told = ": the others tell what it did last" if account.last else ""
    return f"it {does}; it left no record{told}"


def _processes(accounts) -> str:
    numbers = table.numbers(each.process for each in accounts)
    return f"process{'es' if len(accounts) > 1 else ''} {numbers}"


def _seconds(seconds: float) -> str:
    """Return whole seconds, or two digits of less than ten."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"
