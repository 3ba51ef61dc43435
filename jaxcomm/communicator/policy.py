"""How a user has NCCL make communicators."""

import dataclasses
import operator
from typing import Literal

import numpy as np

from jaxcomm import renamed

_MOST = 2**31 - 1  # NCCL's settings are C's int.
# The least and the most of each, and whether None leaves it to NCCL.
_INTEGERS = {
    "lanes": (1, _MOST, False),
    "max_ctas": (1, _MOST, True),
    "min_ctas": (1, _MOST, True),
    "cga_cluster_size": (0, 8, True),
    "traffic_class": (0, _MOST, True),
    "max_p2p_peers": (1, _MOST, True),
    "arena_bytes": (0, 2**63 - 1, False),
}
_CHOICES = {
    "share": ((bool, type(None)), "True, False or None"),
    "blocking": ((bool, type(None)), "True, False or None"),
    "command_buffers": ((bool,), "True or False"),
    "copy_engines": ((bool, type(None)), "True, False or None"),
    "one_shot": ((bool, type(None)), "True, False or None"),
    "device_sizes": ((bool,), "True or False"),
    "symmetric": ((bool,), "True or False"),
    "name": ((str, type(None)), "a string or None"),
}
# What copies between processes and kernels take of the arena, and the ranks of a group
# that they serve: MappedCopies, OneShot and PeerMemory of the extension.
_MAPPED_BYTES, _INBOX_BYTES = 34 << 20, 20 << 20
_MOST_MAPPED_RANKS = 8
_ON_FAILURE = None, "raise", "poison", "exit"


@renamed.explained(
    timeout="JAXCOMM_TIMEOUT=seconds in the environment, for every communicator"
)
@dataclasses.dataclass(frozen=True)
class CommPolicy:
    """How the communicators of the ``nccl`` backend are made.

    Give every process the same. None leaves a field to NCCL, unless said otherwise.
    jaxcomm refuses a setting that the installed NCCL does not know.

    Source: ``ncclConfig_t`` of NCCL 2.18 to 2.32, and NCCL's user guide.

    Attributes:
      share: True splits communicators off with ``splitShare``: they use the buffers of
        the mesh's communicator, cost next to nothing, and NCCL runs their operations
        one after the other. False gives each its own, which may run beside others. If
        None, the default lane shares and other lanes do not.
      lanes: the most lanes over the same axes, 2 unless set. NCCL is known to hang if
        many communicators of a device run at once.
      max_ctas: the most thread blocks, and so channels, of an operation. NCCL's choice
        is up to 32. Fewer leave more of the GPU to computation and take less memory.
      min_ctas: the fewest. NCCL's choice is 1.
      cga_cluster_size: thread blocks to a cluster, 0 to 8. NCCL takes 4 on Hopper.
      traffic_class: of network packets (2.27 and newer). NCCL leaves it to the
        network's plugin.
      name: stands in NCCL's logs (2.27 and newer).
      blocking: False makes every call to NCCL return at once, at the cost of 300 us for
        each operation. True lets NCCL block, also while it makes the mesh's
        communicator. If None, only operations block: the timeout and Ctrl-C can end
        the making.
      command_buffers: True lets XLA record operations in CUDA graphs. It replays a
        graph with fewer launches while the addresses of operands stay the same, and
        records it anew when they change. Counters and flight records miss replayed
        operations, which have no timeout. A communicator in a graph is freed when the
        process ends, not by closing it. Split-phase collectives, and so ring attention,
        are not recorded.
      copy_engines: whether the GPUs' copy engines move the bytes of collectives that
        only move data. It is faster, and leaves thread blocks to computation. It
        applies if a rank sends 32 MiB or more, 4 MiB in a split-phase call, and all
        ranks share a process with peer access. Except for ``ppermute``, arrays must not
        lie in symmetric memory. Each rank waits on the host for its peers, for 2 s at
        most and once in a run of a program; NCCL takes over from then on. Between
        processes of a host they do ``ppermute`` and ``ring_shift`` of 4 to 64 MiB, and
        of 4 MiB or more in a split-phase call. There, and between two GPUs of a
        process, they also do ``all_to_all`` of rows without transposes. Between
        processes nothing waits on the host, and a communicator takes 32 MiB of each
        GPU. If None, True unless ``command_buffers``, which cannot record it.
      one_shot: whether a kernel of this package does small calls in NCCL's place: the
        GPUs write into each other's memory. It takes ``psum``, ``pmean`` and
        ``psum_scatter`` of float32, complex64, 32-bit integers, and an even number of
        bfloat16 or float16 (added in float32, rounded once), by the tree over the
        ranks. It also takes ``all_gather``, ``all_to_all`` along the first dimension,
        and ``ppermute`` in which every rank sends to another and receives from
        another. Arrays have up to 4 MiB: operands, or what a rank gathers. Large ones
        are of whole 16 bytes for each rank. There are 8 ranks at most, on one host and
        in reach of each other's memory. A communicator takes 19 MiB of each GPU. A
        launch costs the host less than NCCL's call. If None, True unless
        ``command_buffers``: each call has a number, which a recorded one would repeat.
      device_sizes: whether the GPUs read the sizes of ``ragged_all_to_all`` themselves,
        so that no host waits for them. It applies to operands of up to 32 MiB a rank
        and results of up to 256 MiB, among up to 8 ranks of one host in reach of each
        other's memory. Hosts read the sizes of other calls, and of all if it is False.
        A communicator takes 64 MiB of each GPU. Slices that do not fit are found when
        the GPUs come to the call, so that the call itself raises nothing: on all ranks
        of its group every bit of the result is set, and the communicator fails as
        ``on_failure`` says. If hosts read the sizes, the call raises, and the
        communicator stays.
      arena_bytes: the most memory of each GPU that other ranks may reach, 512 MiB
        unless set. Copies between processes, ``one_shot`` and ``device_sizes`` take
        theirs of it when a communicator is made. One that finds no room leaves these
        calls to NCCL, as 0 does, and :meth:`Communicator.stats` says why. All
        communicators of the process share it. Their parts are used again once they are
        closed, and the memory is freed with the last of them.
      symmetric: False keeps a :class:`jaxcomm.SymmetricPool` from being registered with
        these communicators.
      on_failure: what happens when an operation fails while a GPU is at it: a process
        ended, it timed out, or NCCL failed. XLA takes what an aborted operation leaves
        in memory for its result. So jaxcomm aborts nothing before it is certain that
        nobody reads that.

        ``"raise"``: jaxcomm stops the GPUs of this process. Results that are not
        computed yet raise, and so does every later use of a GPU, also without
        collectives: end the process and start it anew. stderr says why at once. XLA
        looks whether a GPU failed every five seconds, so that it raises up to five
        seconds later (jaxlib 0.11.2, two H200s). A ``jax.pure_callback`` that runs
        meanwhile ends the process. Operations cost nothing for it. If the GPUs cannot
        be stopped within two seconds, the process ends with a message and status 70.

        ``"poison"``: every bit of the results is set, which is NaN for floats (except
        the ``fnuz`` ones) and -1 for integers. Nothing raises until the next call,
        which says why, on every communicator of the ``nccl`` backend. Arrays, memory
        and GPUs stay usable. Call :func:`jaxcomm.finalize` and :func:`jaxcomm.init` to
        go on. It launches one more small kernel for each operation. If processes share
        the communicator, none stops NCCL before all others have poisoned their results
        or have ended. One that does not answer within two seconds, such as a process
        that is stopped, is given up and killed. If nobody can kill it, the others end
        with status 70 after ten seconds.

        ``"exit"``: the process ends with a message and status 70, after it wrote its
        flight record.

        If None, ``"exit"`` if devices of several processes take part: the GPUs are
        lost in any case, and whoever started the processes hears of it at once.
        Otherwise ``"raise"``, which keeps a notebook's arrays on the host.

        If no operation is under way, nothing is stopped: the next call raises.
      max_p2p_peers: how many peers a rank will send to at a time, which bounds the
        memory kept for them (2.30.3 and newer). NCCL's choice is all.

    Raises:
      ValueError: if a field is of another type or out of range, or two do not go
        together.

    Example:
      >>> policy = jaxcomm.CommPolicy(max_ctas=8)
      >>> policy.max_ctas, policy.lanes
      (8, 2)
    """

    share: bool | None = None
    lanes: int = 2
    max_ctas: int | None = None
    min_ctas: int | None = None
    cga_cluster_size: int | None = None
    traffic_class: int | None = None
    name: str | None = None
    blocking: bool | None = None
    max_p2p_peers: int | None = None
    command_buffers: bool = False
    copy_engines: bool | None = None
    one_shot: bool | None = None
    device_sizes: bool = False
    arena_bytes: int = 512 << 20
    symmetric: bool = True
    on_failure: str | None = None

    def __post_init__(self) -> None:
        for name, (types, wanted) in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, types):
                raise ValueError(f"CommPolicy: {name} must be {wanted}, got {value!r}")
        for name, (least, most, may_be_none) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, np.integer))
                or not least <= value <= most
            ):
                raise ValueError(
                    f"CommPolicy: {name} must be an integer from {least} to {most}"
                    f"{' or None' if may_be_none else ''}, got {value!r}"
                )
            # A plain one also where it was numpy's; the class is frozen.
            object.__setattr__(self, name, operator.index(value))
        if self.on_failure not in _ON_FAILURE:
            raise ValueError(
                f"CommPolicy: on_failure must be 'raise', 'poison', 'exit' or None, "
                f"got {self.on_failure!r}"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError if two fields do not go together."""
        if self.copy_engines and self.command_buffers:
            raise ValueError(
                "CommPolicy: copy_engines=True does not go with command_buffers=True: "
                "XLA cannot record copies that ranks agree on when they run"
            )
        if self.one_shot and self.command_buffers:
            raise ValueError(
                "CommPolicy: one_shot=True does not go with command_buffers=True: each "
                "sum has a number, which a recorded one would repeat"
            )
        if self.min_ctas and self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError(
                f"CommPolicy: min_ctas={self.min_ctas} is more than "
                f"max_ctas={self.max_ctas}"
            )

    def shares(self, is_default_lane: bool) -> bool:
        """Return whether a communicator uses the buffers of the mesh's."""
        return is_default_lane if self.share is None else self.share

    @property
    def uses_copy_engines(self) -> bool:
        """Whether copy engines may move bytes."""
        return self._unless_recorded(self.copy_engines)

    @property
    def uses_one_shot(self) -> bool:
        """Whether small sums may go by a kernel of this package."""
        return self._unless_recorded(self.one_shot)

    def _unless_recorded(self, choice):
        return not self.command_buffers if choice is None else choice


RowMover = Literal["kernels", "copies"]


def row_mover(
    policy: CommPolicy, size: int, processes: int, hosts: int
) -> RowMover | None:
    """Return what sends rows of an ``all_to_all`` as they lie.

    ``None``: nothing does, and NCCL would have them packed. ``engine_choice.cc`` of the
    extension chooses alike.

    Args:
      policy: how the communicator is made.
      size: ranks of its largest group.
      processes: that the mesh spans.
      hosts: that a group spans, at most.
    """
    if hosts > 1 or size > _MOST_MAPPED_RANKS:
        return None
    maps = policy.uses_copy_engines and processes > 1
    room = policy.arena_bytes - (_MAPPED_BYTES if maps else 0)
    if policy.uses_one_shot and size > 2 and room >= _INBOX_BYTES:
        return "kernels"
    if maps:
        return "copies" if room >= 0 else None
    return "copies" if policy.uses_copy_engines and size == 2 else None
