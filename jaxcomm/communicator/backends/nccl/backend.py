"""NVIDIA GPUs: communicators of NCCL, our own or XLA's."""

from typing import Any

from jaxcomm.communicator import failures
from jaxcomm.communicator.backends.backend import Backend, Choice
from jaxcomm.communicator.backends.nccl import communicators, library, registration
from jaxcomm.communicator.communicator import DEFAULT_LANE
from jaxcomm.errors import CommunicatorError


class NcclBackend(Backend):
    """Gives the operations of GPUs to NCCL."""

    name = "nccl"
    platforms = ("gpu",)
    takes_policy = True
    orders_lanes = True

    def choice(self, mesh, part) -> Choice | str:
        """Serves NVIDIA GPUs, if every process of the mesh can load NCCL."""
        refusal = communicators.refusal(mesh)
        if refusal is not None:
            return refusal
        found = library.load()
        assert not isinstance(found, str)  # which would be a refusal
        return Choice(self, f"NCCL {found.version}")

    def make(self, member, mesh, part, choice, live) -> dict[str, int]:
        """Splits it off the mesh's own, and registers symmetric memory with it."""
        if member.borrows:
            communicators.borrow(mesh, part, member)
            return {"borrowed": 1}
        if member.size == 1:
            return {}
        _check_lanes(member, live)
        member.world, is_new = communicators.create(
            mesh, part, member, member.policy, _shares(member)
        )
        if registration.is_wanted(member):
            try:
                for pool in registration.pools(mesh):
                    pool.register_with(member)
            except BaseException:
                self.end(member)
                raise
        return {"created": int(is_new), "split": 1}

    def end(self, member) -> None:
        """Destroys it; the mesh's own goes with the last that was split off it."""
        if member.world is not None or member.borrows:
            super().end(member)
        member.world = None

    def forget(self) -> None:
        """Makes communicators of whole meshes anew, too."""
        failures.stop()
        communicators.forget()

    def memory(self, member, live) -> dict[str, Any]:
        """Tells of the mesh's own, of queues, and of registered pools."""
        return {
            "parent_bytes": member.world.device_bytes if member.world else 0,
            "pinned_bytes": communicators.pinned_bytes(member),
            "symmetric_bytes": registration.bytes_with(member),
            "shared": member.borrows or _shares(member),
        }


def _shares(member):
    return member.policy.shares(member.lane == DEFAULT_LANE)


def _check_lanes(made, live):
    lanes = {
        member.lane
        for member in live
        if (member.grid, member.axes, member.index_groups, member.backend)
        == (made.grid, made.axes, made.index_groups, made.backend)
    }
    if len(lanes) >= made.policy.lanes:
        raise CommunicatorError(
            f"axes {made.axes} have lanes {sorted(lanes)} already, as many as "
            f"CommPolicy(lanes={made.policy.lanes}) allows; close one, or raise the "
            f"bound before making lane {made.lane!r}"
        )
