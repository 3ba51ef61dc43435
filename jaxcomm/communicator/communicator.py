"""One communicator: what it joins, what it did, and how it ends."""

from collections.abc import Callable
from typing import Any, NoReturn

from jaxcomm._built import _ffi
from jaxcomm.communicator.backends.backend import CommunicatorSpec, Connection


class Communicator:
    """One partition of a mesh's devices, ready to communicate.

    Attributes:
      axes: the mesh axes it joins.
      index_groups: the ``axis_index_groups`` it is divided by, or None.
      lane: its lane. Operations of different lanes may overlap.
      backend: name of its backend: ``"host"`` (our own transport), ``"nccl"`` or
        ``"xla"`` (XLA's collectives).
      is_ours: whether its operations are custom calls of this package, which counts
        and records them. Operations of the ``xla`` backend run inside XLA.
      orders_lanes: whether operations of its lane run one after the other.
      platform: of its devices, as JAX names it.
      transport: how its bytes travel: ``"memory"``, ``"shared memory"``, ``"NCCL "``
        and its version, ``"xla"``, or ``"xla: "`` and why it is not one of the others.
      neighbors: the processes that share memory, if its groups span several.
      policy: how NCCL was asked to make it; None for other backends.
      timeout: seconds a rank waits for the others before it raises. The ``xla``
        backend has timeouts of its own.
      groups: global device ids of each group, in rank order.
      key: the content hash by which compiled programs name it.
      closed: whether :meth:`close` or :func:`finalize` ended it.
      spec: what it was made from.
      connection: what its backend made.
    """

    def __init__(
        self,
        spec: CommunicatorSpec,
        connection: Connection,
        end: Callable[["Communicator"], object],
    ):
        """Show what a backend made; closing it calls ``end`` with it."""
        self.spec = spec
        self.connection = connection
        self.axes = spec.partition.axes
        self.index_groups = spec.partition.index_groups
        self.groups = spec.partition.groups
        self.lane = spec.lane
        self.backend = spec.backend.name
        self.is_ours = spec.backend.is_ours
        self.orders_lanes = spec.backend.orders_lanes
        self.platform = spec.platform
        self.transport = connection.transport
        self.neighbors = connection.neighbors
        self.policy = spec.policy
        self.timeout = spec.timeout
        self.key = spec.key
        self.closed = False
        self._end = end

    def __reduce__(self) -> NoReturn:
        """Refuse: a copy would be another object with the same communicator."""
        raise TypeError(
            "a communicator cannot be copied or pickled: it belongs to this process. "
            "Get it anew from jaxcomm.init or jaxcomm.communicators()"
        )

    @property
    def size(self) -> int:
        """The number of devices of its largest group."""
        return self.spec.size

    @property
    def world(self) -> "_ffi.NcclWorld | None":
        """NCCL's communicator of the whole mesh, which this one was split off."""
        return self.connection.world

    def stats(self) -> dict[str, Any]:
        """Return what it did so far.

        Returns:
          A dictionary. All is zero for the ``xla`` backend, whose collectives run
          inside XLA.

          * ``calls``: completed collectives by name, as one group counts them;
          * ``bytes``: handed in by the ranks of this process;
          * ``host_bytes``: held by the communicator itself;
          * ``device_bytes``: likewise on devices;
          * ``in_flight``: collectives some rank waits in;
          * ``waited_for``: seconds in which this process slept since another one had
            not come, by the number of that process. For the ``host`` backend, and
            shared by all communicators between the same processes;
          * ``symmetric_calls``: calls of the ``nccl`` backend whose arrays all lay in a
            :class:`SymmetricPool`;
          * ``copied_calls``: calls that copy engines did;
          * ``one_shot_calls``: small calls that a kernel of this package did;
          * ``device_sized_calls``: of ``ragged_all_to_all``, whose sizes no host read;
          * ``one_shot``: whether the ``nccl`` backend has that kernel here, ``"yes"``
            or ``"no: "`` and why;
          * ``copies``: likewise whether copy engines move what only moves;
          * ``device_sizes``: likewise whether its GPUs read the sizes of
            ``ragged_all_to_all``.

        Example:
          >>> (communicator,) = jaxcomm.init(mesh, "context")
          >>> communicator.stats()["calls"]
          {}
        """
        found = _ffi.stats(self.key) if self.is_ours and not self.closed else {}
        return {
            "calls": {}, "bytes": 0, "host_bytes": 0, "device_bytes": 0, "in_flight": 0,
            "waited_for": {},
            "symmetric_calls": 0, "copied_calls": 0, "one_shot_calls": 0,
            "device_sized_calls": 0, "one_shot": "", "copies": "",
            "device_sizes": "",
            **found,
        }  # fmt: skip

    def close(self) -> None:
        """End it. Ranks that wait in it raise. Closing twice is harmless.

        Programs compiled for it raise until it is made anew: by :func:`init`, or by
        the compilation of a program that needs it. :func:`init` makes none for
        ``axis_index_groups``; ``jax.clear_caches()`` has JAX compile programs again.
        """
        self._end(self)

    def __enter__(self) -> "Communicator":
        """Return itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Say in one line what it joins."""
        state = "closed" if self.closed else "live"
        return (
            f"<Communicator axes={self.axes} lane={self.lane!r} backend={self.backend} "
            f"groups={len(self.groups)} x {self.size} {state}>"
        )
