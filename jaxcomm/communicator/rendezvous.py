"""How processes agree, through the store of ``jax.distributed``.

They meet in numbered rounds. Every round has a timeout, and its error names the
processes that did not come. What jaxcomm decides from a round depends on what all
processes published. So all decide alike.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxcomm.communicator import peer_info, rounds
from jaxcomm.communicator.rounds import Purpose as Purpose
from jaxcomm.communicator.rounds import Round
from jaxcomm.communicator.store import of_job

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Met:
    """What a round brought.

    Attributes:
      values: what each process gave.
      peers: (pid, start time, process, thread) of the peers whose end this process can
        see: they run on this host, in the same namespace of process ids. The thread
        ends as soon as its process begins to end.
    """

    values: dict[int, Any]
    peers: list[tuple[int, int, int, int]]


def meet(
    processes: tuple[int, ...], self_index: int, purpose: Purpose, value: Any
) -> Met:
    """Exchange a value with other processes; each of them must call this.

    Args:
      processes: JAX's process indices, sorted; this process is one of them.
      self_index: index of this process.
      purpose: why.
      value: what this process gives the others, of JSON's types.

    Raises:
      CommunicatorError: if some did not come in time, or came for another purpose.
    """

    def tell(current: Round) -> Met | None:
        infos = current.collect_infos(value)
        if infos is None:
            return None
        return Met(current.values, peer_info.visible_peers(infos, self_index))

    return agree(processes, self_index, purpose, tell)


def exchange(
    processes: tuple[int, ...], self_index: int, what: str, value: Any
) -> dict[int, Any]:
    """Return what each of the processes gave, once all have come.

    Args:
      processes: as for :func:`meet`.
      self_index: as for :func:`meet`.
      what: a name for it.
      value: what this process gives, of JSON's types.

    Raises:
      CommunicatorError: if some did not come in time, or exchange something else.
    """
    return meet(processes, self_index, Purpose(f"exchange {what!r}"), value).values


def broadcast(
    processes: tuple[int, ...], self_index: int, what: str, make: Callable[[], Any]
) -> Any:
    """Return what ``make()`` gave the first of the processes, once all have come.

    Arguments and errors are those of :func:`exchange`.
    """
    first = processes[0]
    if len(processes) == 1:
        return make()
    value = make() if self_index == first else None
    return exchange(processes, self_index, what, value)[first]


def peers(
    processes: tuple[int, ...], self_index: int
) -> list[tuple[int, int, int, int]]:
    """Return :attr:`Met.peers` of a round that has no other purpose.

    Arguments and errors are those of :func:`exchange`.
    """
    if len(processes) == 1:
        return []
    return meet(processes, self_index, Purpose("see each other"), None).peers


def agree(
    processes: tuple[int, ...],
    me: int,
    purpose: Purpose,
    step: Callable[[Round], _T | None],
) -> _T:
    """Return what ``step(round)`` gives; each of the processes must call this.

    Args:
      processes: as for :func:`meet`.
      me: index of this process.
      purpose: why.
      step: collects from the round. It returns None if the round does, because peers
        are in a newer one. Then it is called again, in that one.

    Raises:
      CommunicatorError: as for :func:`meet`.
    """
    number = rounds.finished.get((processes, me), 0)
    current = Round(of_job(processes), processes, me, purpose, number)
    try:
        while (result := step(current)) is None:
            current.go_on()
        return result
    except BaseException:
        # Also Ctrl-C: nobody is to count on what this process said so far. A verdict
        # is the exception: the others have yet to reach it, from the same infos.
        with contextlib.suppress(Exception):  # the store itself may be gone
            current.leave()
            if not current.has_verdict:
                current.withdraw()
        raise
    finally:
        # A process that failed never enters this round again. So nothing that was said
        # in it is taken for an answer in another.
        rounds.finished[processes, me] = current.number + 1
