"""NVIDIA GPUs: communicators of NCCL."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomm import config
from jaxcomm._built import _ffi
from jaxcomm.communicator import failures
from jaxcomm.communicator.backends.backend import (
    Backend,
    CommunicatorSpec,
    Connection,
    Status,
)
from jaxcomm.communicator.backends.nccl import (
    agreement,
    communicators,
    devices,
    library,
    registration,
)
from jaxcomm.communicator.policy import RowMover, row_mover
from jaxcomm.communicator.replica_groups import Partition
from jaxcomm.errors import CommunicatorError

# The version code from which NCCL accepts NCCL_MULTI_RANK_GPU_ENABLE=1.
_MANY_RANKS_ON_A_GPU = 23003


class NcclBackend(Backend):
    """Gives the operations of GPUs to NCCL."""

    name = "nccl"
    platforms = ("gpu",)
    ffi_platform = "CUDA"
    takes_policy = True
    orders_lanes = True
    can_stop = True

    def refusal(self, mesh: jax.sharding.Mesh, partition: Partition) -> str | None:
        """Serve NVIDIA GPUs, if every process of the mesh can load NCCL."""
        return agreement.refusal(mesh)

    def make(
        self, spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]
    ) -> Connection:
        """Split it off the mesh's own, and register symmetric memory with it."""
        found = library.load()
        assert not isinstance(found, str)  # a refusal
        connection = Connection(f"NCCL {found.version}")
        if not devices.are_gpus(spec.platform):
            devices.register_stand_in()
        if spec.size > 1:
            _check_lanes(spec, live)
            _check_recording(spec)
            connection.world, is_new, hosts = communicators.create(spec)
            connection.counted = {"created": int(is_new), "split": 1}
            connection.row_mover = _row_mover(spec, hosts)
            self._register_pools(spec, connection)
        return connection

    def _register_pools(self, spec: CommunicatorSpec, connection: Connection) -> None:
        if not communicators.policy_of(spec).symmetric:
            return
        try:
            for pool in registration.pools(spec.mesh):
                pool.register_with(spec.key)
        except BaseException:
            self.end(spec, connection)
            raise

    def prepare(self, spec: CommunicatorSpec, collective: str) -> None:
        """Make the memory in which ranks exchange offsets and sizes."""
        if collective != "ragged_all_to_all":
            return
        try:
            _ffi.prepare_data_dependent(spec.key)
        except RuntimeError as error:
            raise CommunicatorError(
                f"{spec}: no memory for offsets and sizes of {collective}: {error}. "
                f"Leave XLA less of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION), or use "
                f"groups of fewer ranks"
            ) from None

    def end(self, spec: CommunicatorSpec, connection: Connection) -> None:
        """Destroy it; the mesh's own goes with the last that was split off it."""
        if connection.world is not None:
            super().end(spec, connection)
        connection.world = None

    def forget(self, is_over: Callable[[Sequence[int]], bool]) -> None:
        """Make communicators of whole meshes anew, too."""
        failures.stop()
        communicators.forget()
        agreement.forget(is_over)

    def check_usable(self) -> None:
        """Refuse once the GPUs of this process were stopped.

        At once, before other processes are waited for: they may have ended.
        """
        agreement.check_not_stopped()

    def status(self) -> Status:
        """Serve where NCCL can be loaded."""
        found = library.load()
        if isinstance(found, str):
            # A problem if somebody named the library; others may not want any.
            is_fine = False if config.nccl_library() else None
            text = f"unavailable: {found}"
            return Status(False, text, is_fine, {"reason": found})
        shares = found.version_code >= _MANY_RANKS_ON_A_GPU
        text = (
            f"NCCL {found.version} from {found.path}, for NVIDIA GPUs (CUDA "
            f"{found.driver_version}); several ranks on one GPU: "
            f"{'yes' if shares else 'no, from 2.30.3'}"
        )
        if found.missing:
            text += f"; it lacks {', '.join(found.missing)}"
        return Status(True, text, True, dataclasses.asdict(found))

    def memory(
        self,
        spec: CommunicatorSpec,
        connection: Connection,
        live: Sequence[Connection],
    ) -> dict[str, Any]:
        """Report the mesh's own, queues, and registered pools."""
        world = connection.world
        return {
            "parent_bytes": world.device_bytes if world else 0,
            "arena_bytes": _ffi.arena_bytes() if world else 0,
            "pinned_bytes": communicators.pinned_bytes(spec) if world else 0,
            "symmetric_bytes": registration.bytes_with(spec.key),
            "shared": communicators.shares(spec),
        }

    def target(self, spec: CommunicatorSpec, collective: str, is_start: bool) -> str:
        """Those that XLA may record have handlers of their own."""
        name = super().target(spec, collective, is_start)
        if not devices.are_gpus(spec.platform):
            return devices.target_of_stand_in(collective)
        is_recorded = communicators.policy_of(spec).command_buffers and not is_start
        return f"{name}.capturable" if is_recorded else name


def _row_mover(spec: CommunicatorSpec, hosts: int) -> RowMover | None:
    """Say what all processes of the mesh know alike, for they lower one program."""
    policy, processes = communicators.policy_of(spec), len(spec.processes)
    if processes == 1:
        stats = _ffi.stats(spec.key)
        policy = dataclasses.replace(
            policy,
            one_shot=policy.uses_one_shot and stats["one_shot"] == "yes",
            copy_engines=policy.uses_copy_engines and stats["copies"] == "yes",
        )
    return row_mover(policy, spec.size, processes, hosts)


def _check_recording(spec: CommunicatorSpec) -> None:
    if config.check() and communicators.policy_of(spec).command_buffers:
        raise CommunicatorError(
            f"{spec}: JAXCOMM_CHECK=1 does not go with "
            f"CommPolicy(command_buffers=True): ranks cannot compare calls that a CUDA "
            f"graph replays. Leave one of them out"
        )


def _check_lanes(spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]) -> None:
    lanes = {
        other.lane
        for other in live
        if (other.grid, other.partition, other.backend)
        == (spec.grid, spec.partition, spec.backend)
    }
    most = communicators.policy_of(spec).lanes
    if len(lanes - {spec.lane}) >= most:
        raise CommunicatorError(
            f"axes {spec.partition.axes} have lanes {sorted(lanes)} already, as many "
            f"as CommPolicy(lanes={most}) allows; close one, or raise the bound before "
            f"making lane {spec.lane!r}"
        )
