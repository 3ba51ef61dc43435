"""Many processes in one: threads that each think they are a process of a job.

Each has one device, which is not there. They meet in a store that is a dictionary, and
make communicators of NCCL. Nothing moves data.
"""

import collections
import threading
import types
import uuid
from collections.abc import Callable, MutableMapping

import jax
import numpy as np
import waiting
from job_store import JobStore

from jaxcomm.communicator import backends, failures, peer_info, replica_groups
from jaxcomm.communicator.backends import CommunicatorSpec
from jaxcomm.communicator.backends.nccl import agreement, communicators
from jaxcomm.communicator.policy import CommPolicy

_SECONDS = 900
_OF_A_HOST = 8
_here = threading.local()


class World:
    """NCCL's communicator of a whole mesh, where all ranks must make the same.

    ``ncclCommInitRank`` and ``ncclCommSplit`` return when all ranks have called them.
    Ranks that call different things would wait for good; here they raise.
    """

    is_broken = False
    device_bytes = 0

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._asked = collections.defaultdict(set)
        self._turn = collections.Counter()

    def meet(self, what):
        turn = self._turn[_here.index]
        self._turn[_here.index] += 1
        self._asked[turn].add(what)
        self._barrier.wait(waiting.HANG_SECONDS)
        if len(self._asked[turn]) > 1:
            raise RuntimeError(f"ranks make different things: {self._asked[turn]}")


class Recorder:
    """Stands in for the extension's calls of NCCL, and remembers what was made.

    Attributes:
      made: (key, axes) of each process's communicators, in order.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._worlds = {}
        self._ids = 0
        self.made = collections.defaultdict(list)

    def nccl_unique_id(self):
        with self._lock:
            self._ids += 1
            return self._ids.to_bytes(8, "little")

    def nccl_world(self, *, size, unique_id, numbers, **_):
        with self._lock:
            world = self._worlds.setdefault(unique_id, World(size))
        world.meet(("world", str(numbers)))
        return world

    def create_nccl(self, *, world, key, axes, groups, numbers, **_):
        world.meet((key, axes, str(groups), str(numbers)))
        self.made[_here.index].append((key, axes))


class _OfProcess(MutableMapping):
    """A dictionary of which each process has its own."""

    def __init__(self):
        self._of = collections.defaultdict(dict)

    def __getitem__(self, key):
        return self._of[_here.index][key]

    def __setitem__(self, key, value):
        self._of[_here.index][key] = value

    def __delitem__(self, key):
        del self._of[_here.index][key]

    def __iter__(self):
        return iter(self._of[_here.index])

    def __len__(self):
        return len(self._of[_here.index])


def _boot_id():
    return str(uuid.UUID(int=_here.index // _OF_A_HOST))


class Mesh:
    """A mesh of devices that are not there, one in each process."""

    def __init__(self, **axes):
        self.shape = axes
        self.axis_names = tuple(axes)
        ids = np.arange(np.prod(list(axes.values())))
        self.devices = np.array(
            [
                types.SimpleNamespace(
                    platform="cpu", process_index=i, id=i, local_hardware_id=i
                )
                for i in map(int, ids)
            ]
        ).reshape(tuple(axes.values()))

    @property
    def local_devices(self):
        return [self.devices.flat[_here.index]]


class Job:
    """Processes that make the communicators of a mesh."""

    def __init__(self, monkeypatch, extension):
        self.store = JobStore()
        self.extension = extension
        monkeypatch.setenv("JAXCOMM_TIMEOUT", str(_SECONDS))
        self.store.serve(monkeypatch)
        monkeypatch.setattr(jax, "process_index", lambda: _here.index)
        monkeypatch.setattr(peer_info, "_boot_id", _boot_id)
        monkeypatch.setattr(communicators, "_ffi", extension)
        monkeypatch.setattr(communicators, "_worlds", _OfProcess())
        monkeypatch.setattr(communicators, "_begun", _OfProcess())
        monkeypatch.setattr(agreement, "_refusals", _OfProcess())
        monkeypatch.setattr(agreement.devices, "refusal", lambda platform: None)
        # It polls the store from a thread of its own.
        monkeypatch.setattr(failures, "watch", lambda unique_id, world: None)

    def run(self, function: Callable, size: int) -> dict:
        """Return what ``function()`` returned, or raised, in each process."""

        def run(index):
            _here.index = index
            return function()

        found, _ = self.store.run(dict.fromkeys(range(size), run))
        return found


def create(mesh, partitions_of, lanes=("default",), policy=None):
    """Make communicators as ``jaxcomm.init`` does, but for the cache of one process."""
    nccl = backends.BACKENDS["nccl"]
    grid = replica_groups.grid_of(mesh)
    for axes in partitions_of:
        partition = replica_groups.partition(grid, axes)
        assert nccl.refusal(mesh, partition) is None
        for lane in lanes:
            communicators.create(
                CommunicatorSpec(
                    mesh, partition, lane, nccl, policy or CommPolicy(), _SECONDS
                )
            )
