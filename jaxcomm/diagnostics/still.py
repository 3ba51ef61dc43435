"""Processes whose CPU time stands still: what is known of each, and who may be why.

Nothing tells what a CPU collective of another library does. So nobody is accused here:
a process is *likely*, or nobody can tell.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.seen import STATES, Seen

_FRAME = re.compile(r'  File "(?:.*/)?([^"/]+)", line (\d+) in ')
_THREADS = "futex"
_SLEEP = "hrtimer_nanosleep"


def lines(
    seen: Sequence[Seen], still: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> list[str]:
    """Return what is known of each process, and its stacks of Python.

    Args:
      seen: what the launcher saw of them.
      still: those whose CPU time stands still.
      stacks: of those that answered, as ``Merged.stacks`` gives them.
    """
    found = []
    for each in seen:
        found.append(f"{_name(each)}: {_does(each, still, stacks)}")
        found += stacks.get(each.process) or (
            [] if each.status is not None else ["  no stacks: it did not answer"]
        )
    return found


def verdict(
    seen: Sequence[Seen], still: Collection[int], stacks: Mapping[int, Sequence[str]]
) -> str:
    """Say who may hold up the others, as far as it can be known.

    Args:
      seen: what the launcher saw of them.
      still: those whose CPU time stands still.
      stacks: of those that answered.
    """
    running = [each for each in seen if each.status is None]
    if len(seen) < 2 or not running:
        return "cannot tell whether it waits for something that comes"
    ended = [each for each in seen if each.status == 0]
    waiting = [each for each in running if _waits_for_threads(each)]
    working = [each for each in running if each.process not in still]
    others = [each for each in running if each not in waiting and each not in working]
    if working:
        names = table.numbers(each.process for each in working)
        does = "work" if len(working) > 1 else "works"
        return (
            f"cannot tell: process{'es' if len(working) > 1 else ''} {names} {does}, "
            f"and the others may wait for that"
        )
    if ended and len(waiting) == len(running):
        return f"likely: {_names(ended)}: the others may wait for what has ended"
    if waiting and others and not ended and all(each.call for each in others):
        at = " or ".join(_thread(each, stacks) for each in others)
        return (
            f"likely: {_names(others)}: its main thread {at}, and the others' main "
            f"threads wait for other threads, as in a collective"
        )
    return (
        f"cannot tell: any of processes {table.numbers(each.process for each in seen)} "
        f"may hold up the others"
    )


def may_be_stuck(seen: Sequence[Seen], still: Collection[int]) -> bool:
    """Return whether all stand still, and some wait as in a collective.

    Args:
      seen: what the launcher saw of them.
      still: those whose CPU time stands still.
    """
    running = [each for each in seen if each.status is None]
    return (
        len(seen) > 1
        and all(each.process in still for each in running)
        and any(map(_waits_for_threads, running))
    )


def all_wait(seen: Sequence[Seen]) -> bool:
    """Return whether the main threads of all that run wait for other threads."""
    running = [each for each in seen if each.status is None]
    return bool(running) and all(map(_waits_for_threads, running))


def _waits_for_threads(each: Seen) -> bool:
    return each.state == "S" and each.call.startswith(_THREADS)


def _does(each, still, stacks) -> str:
    if each.status is not None:
        return f"its program {str(each).removeprefix('was ')}"
    does = STATES.get(each.state[:1], "is in an unknown state")
    time = "stands still" if each.process in still else "moves on"
    text = f"{does} (state {each.state}), and its CPU time {time}"
    thread = _thread(each, stacks)
    return f"{text}; its main thread {thread}" if thread else text


def _thread(each, stacks) -> str:
    """Say what its main thread does, and where in the program."""
    if _waits_for_threads(each):
        text = "waits for another thread"
    elif each.call == _SLEEP:
        text = "sleeps"
    elif each.call and each.state in ("S", "D"):
        text = f"waits in the kernel ({each.call})"
    else:
        text = ""
    # The first thread comes last, its innermost frame first.
    thread = "\n".join(stacks.get(each.process, ())).rpartition("\nThread ")[2]
    frame = _FRAME.search(thread)
    at = f"is at {frame[1]}:{frame[2]}" if frame else ""
    return " and ".join(filter(None, [text, at]))


def _name(each: Seen) -> str:
    return f"process {each.process} (pid {each.pid})"


def _names(several: Sequence[Seen]) -> str:
    return " or ".join(map(_name, several))
