"""Calls in a ``shard_map`` that leaves axes of the mesh to XLA.

XLA splits arrays over such axes as it likes, and does not split what a custom call
reads: it would gather the operand over them first. Only XLA's own collectives can be
divided there, as far as XLA divides them.
"""

import warnings
import weakref
from collections.abc import Iterable

from jaxcomm.communicator import backends, cache
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.replica_groups import Partition
from jaxcomm.errors import CommunicatorError
from jaxcomm.primitives.call import Call

# The communicators of XLA whose calls were noticed already.
_noticed: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def check_left_to_xla(call: Call, partition: Partition, axes: Iterable[str]) -> None:
    """Raise CommunicatorError if a backend of ours was asked for.

    Args:
      call: to be lowered.
      partition: of its axes.
      axes: that ``shard_map`` leaves to XLA.
    """
    asked = call.backend or cache.chosen_backend(partition, call.lane or DEFAULT_LANE)
    if asked is not None and backends.named(asked).is_ours:
        raise CommunicatorError(
            f"{call.where}: backend {asked!r} was asked for, and shard_map leaves axes "
            f"{tuple(sorted(axes))} to XLA, which would gather operands over them for "
            f"it. Name every axis of the mesh in shard_map's axis_names, and in its "
            f"specs how it splits arrays; or use backend='xla'"
        )


def notice(
    call: Call, partition: Partition, axes: Iterable[str], communicator: Communicator
) -> None:
    """Warn, once for a communicator, that XLA carries what nobody left to it."""
    lane = call.lane or DEFAULT_LANE
    is_meant = call.is_portable or cache.chosen_backend(partition, lane) == "xla"
    if is_meant or communicator in _noticed:
        return
    _noticed.add(communicator)
    warnings.warn(
        f"{call.where}: XLA's own collective is used here, because shard_map leaves "
        f"axes {tuple(sorted(axes))} to XLA, which would gather operands over them for "
        f"jaxcomm's. Name every axis of the mesh in shard_map's axis_names, and in its "
        f"specs how it splits arrays; or pass backend='xla' to say that XLA's is meant",
        RuntimeWarning,
        stacklevel=2,
    )
