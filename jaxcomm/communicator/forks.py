"""Children that a program forks: communicators stay with their parent.

A child has its parent's objects and memory, and none of its threads. It must not touch
shared memory or sockets, which other processes take for the parent's. So it finds no
communicators, makes none, and its end closes none.
"""

import contextlib
import os
from collections.abc import Callable

from jaxcomm import compat
from jaxcomm.errors import CommunicatorError

# Whether this process has what no child of it can have, and its parent, if that had.
_has_part = False
_parent: int | None = None


def take_part(what: str) -> None:
    """Say that this process communicates: children that it forks from now on may not.

    Raises:
      CommunicatorError: this is such a child, and cannot have ``what``.
    """
    global _has_part
    if _parent is not None:
        raise CommunicatorError(
            f"{what} in process {os.getpid()}, which was forked from process "
            f"{_parent}: a child cannot use its parent's JAX and communicators. Start "
            f'processes by multiprocessing.get_context("spawn"), or by "forkserver"'
        )
    _has_part = True


def may_take_part() -> bool:
    """Say whether this process is none of the children that communicate no more."""
    return _parent is None


def in_child(call: Callable[[], object]) -> None:
    """Have each child that is forked from here on call this first."""
    with contextlib.suppress(AttributeError):  # no fork on this system
        os.register_at_fork(after_in_child=call)


def _leave_to_parent() -> None:
    global _parent
    # In a job it has its parent's number, even before that makes a communicator.
    if _has_part or compat.key_value_store() is not None:
        _parent = _parent or os.getppid()


in_child(_leave_to_parent)
