"""One communicator: what it joins, what it did, and how it ends."""

from collections.abc import Callable

from jaxcomm import _ffi
from jaxcomm.communicator import replica_groups
from jaxcomm.errors import CommunicatorError

DEFAULT_LANE = "default"


def check_lane(lane, what: str) -> None:
    """Raise ValueError, which calls it ``what``, unless it is a name."""
    if not isinstance(lane, str) or not lane:
        raise ValueError(f"{what} must be a non-empty string, got {lane!r}")


class Communicator:
    """One partition of a mesh's devices, ready to communicate.

    Attributes:
      axes: the mesh axes it joins.
      index_groups: the ``axis_index_groups`` it is divided by, or None.
      lane: its lane; operations of one lane are ordered, those of different lanes
        may overlap.
      backend: ``"host"`` (our own transport), ``"nccl"`` or ``"xla"`` (XLA's
        collectives).
      is_ours: whether its operations are custom calls of this package, which counts
        and records them; those of the ``xla`` backend run inside XLA.
      transport: how its bytes travel: ``"memory"``, ``"shared memory"``, ``"NCCL "``
        and its version, ``"xla"``, or ``"xla: "`` and why it is not one of the others.
      policy: how NCCL was asked to make it; None for other backends.
      timeout: seconds a rank waits for the others before it raises. The ``xla``
        backend has deadlines of its own.
      groups: global device ids of each group, in rank order.
      key: the content hash by which compiled programs name it.
      closed: whether :meth:`close` or :func:`finalize` ended it.
    """

    def __init__(
        self, grid, part, lane, platform, choice, policy, timeout: float, end: Callable
    ):
        """Describes the communicator; :func:`init` also makes it live.

        ``end`` is called with it when it is closed.
        """
        self.grid = grid
        self.axes = part.axes
        self.index_groups = part.index_groups
        self.lane = lane
        self.backend = choice.backend.name
        self.is_ours = choice.backend.is_ours
        self.platform = platform
        self.transport = choice.transport
        self.neighbors = choice.neighbors
        self.groups = part.groups
        self.policy = policy if choice.backend.takes_policy else None
        self.timeout = timeout
        self.closed = True
        self._end = end
        self.key = replica_groups.key(
            grid, part, lane, self.backend, repr(self.policy) if self.policy else ""
        )
        # What it was split off, which lives as long as this.
        self.world: _ffi.NcclWorld | None = None

    def __reduce__(self):
        """Refuses: a copy would be another object with the same communicator."""
        raise TypeError(
            "a communicator cannot be copied or pickled: it belongs to this process. "
            "Get it anew from jaxcomm.init or jaxcomm.communicators()"
        )

    @property
    def size(self) -> int:
        """The number of devices of its largest group."""
        return max(len(group) for group in self.groups)

    @property
    def borrows(self) -> bool:
        """Whether XLA lends NCCL's communicator: ``CommPolicy(source="xla")``."""
        is_one = self.policy is not None and self.policy.source == "xla"
        return is_one and self.size > 1

    def stats(self) -> dict:
        """Returns what it did so far.

        Returns:
          ``calls``: completed collectives by name, as one group counts them;
          ``bytes``: handed in by the ranks of this process; ``host_bytes``: held by
          the communicator itself, ``device_bytes`` likewise on devices;
          ``in_flight``: collectives some rank waits in; ``symmetric_calls``: of the
          ``nccl`` backend, those whose arrays all lay in a :class:`SymmetricPool`;
          ``copied_calls``: those that copy engines did; ``one_shot_calls``: small sums
          that a kernel of this package did; ``one_shot``: of the ``nccl`` backend,
          whether there is one, ``"yes"`` or ``"no: "`` and why;
          ``is_suspended``.
          All zero for the ``xla`` backend, whose collectives run inside XLA.

        Example:
          >>> communicator.stats()["calls"]  # doctest: +SKIP
          {'psum': 20, 'ppermute': 3}
        """
        found = _ffi.stats(self.key) if self.is_ours and not self.closed else {}
        return {
            "calls": {}, "bytes": 0, "host_bytes": 0, "device_bytes": 0, "in_flight": 0,
            "symmetric_calls": 0, "copied_calls": 0, "one_shot_calls": 0,
            "one_shot": "", "is_suspended": False, **found,
        }  # fmt: skip

    def close(self) -> None:
        """Ends it; whoever waits in it gets an error. Closing twice is harmless.

        Programs compiled for it raise until :func:`init` makes it anew.
        """
        self._end(self)

    @property
    def suspended(self) -> bool:
        """Whether :meth:`suspend` gave its device memory back."""
        return bool(self.stats()["is_suspended"])

    def suspend(self) -> None:
        """Gives its device memory back until :meth:`resume`; every process calls it.

        Call ``jax.block_until_ready`` on what programs gave first: it waits for the
        operations on their way, but those that come when there are none fail, also of a
        program that was called before and has yet to run. Suspending twice is harmless.

        Raises:
          CommunicatorError: if it is closed, not of the ``nccl`` backend, shares its
            memory (``CommPolicy(share=False)`` makes one that does not), NCCL is older
            than 2.29.7 or refuses, or the other processes do not come within
            ``timeout`` seconds, which ends the communicator.

        Example:
          >>> jax.block_until_ready(state)  # doctest: +SKIP
          >>> communicator.suspend()  # doctest: +SKIP
          >>> communicator.suspended  # doctest: +SKIP
          True
        """
        self._suspend(True)

    def resume(self) -> None:
        """Takes the memory that :meth:`suspend` gave back; every process calls it.

        Raises:
          CommunicatorError: as :meth:`suspend` does.
        """
        self._suspend(False)

    def _suspend(self, suspend):
        what = "suspend" if suspend else "resume"
        if self.closed or self.world is None:
            state = "closed" if self.closed else f"of the {self.backend!r} backend"
            if not self.closed and self.backend == "nccl":
                state = "XLA's own, or of groups of one"
            raise CommunicatorError(
                f"{what}: the communicator over axes {self.axes} (lane {self.lane!r}) "
                f"is {state}; live ones of the 'nccl' backend can be suspended"
            )
        try:
            _ffi.suspend(self.key, suspend)
        except RuntimeError as error:
            raise CommunicatorError(f"{what}: {error}") from None

    def __enter__(self) -> "Communicator":
        """Returns itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *exc_info) -> None:
        """Closes it."""
        self.close()

    def __repr__(self) -> str:
        """Says in one line what it joins."""
        state = "closed" if self.closed else "live"
        return (
            f"<Communicator axes={self.axes} lane={self.lane!r} backend={self.backend} "
            f"groups={len(self.groups)} x {self.size} {state}>"
        )
