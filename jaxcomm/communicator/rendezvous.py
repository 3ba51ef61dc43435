"""How processes agree, through the store of ``jax.distributed``.

They meet in numbered rounds. Every round has a timeout, and its error names the
processes that did not come. What jaxcomm decides from a round depends on what all
processes gave. So all decide alike.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxcomm.communicator import peer_info
from jaxcomm.communicator.purpose import Purpose as Purpose
from jaxcomm.communicator.rounds import NewerRound, Round
from jaxcomm.communicator.store import of_job

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Met:
    """What a round brought.

    Attributes:
      values: what each process gave.
      infos_of_host: reads the infos of the processes of this host from the store.
      process: this one.
    """

    values: dict[int, Any]
    infos_of_host: Callable[[], dict[int, peer_info.PeerInfo]]
    process: int

    def peers(self) -> list[tuple[int, int, int, int]]:
        """Return (pid, start time, process, thread) of the peers whose end we can see.

        They run on this host, in the same namespace of process ids. The thread ends as
        soon as its process begins to end.
        """
        return peer_info.visible_peers(self.infos_of_host(), self.process)


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
    return agree(
        processes,
        self_index,
        purpose,
        lambda current: Met(current.collect(value), current.infos_of_host, self_index),
    )


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
    """Return :meth:`Met.peers` of a round that has no other purpose.

    Arguments and errors are those of :func:`exchange`.
    """
    if len(processes) == 1:
        return []
    return meet(processes, self_index, Purpose("see each other"), None).peers()


def agree(
    processes: tuple[int, ...],
    me: int,
    purpose: Purpose,
    step: Callable[[Round], _T],
) -> _T:
    """Return what ``step(round)`` gives; each of the processes must call this.

    Args:
      processes: as for :func:`meet`.
      me: index of this process.
      purpose: why.
      step: collects from the round. If that raises NewerRound, it is called again, in
        that one.

    Raises:
      CommunicatorError: as for :func:`meet`.
    """
    current = Round(of_job(processes), processes, me, purpose)
    try:
        while True:
            try:
                return step(current)
            except NewerRound:
                current.go_on()
    except BaseException:
        # Also Ctrl-C: nobody is to wait for this process in this round.
        with contextlib.suppress(Exception):  # the store itself may be gone
            current.leave()
        raise
    finally:
        current.finish()
