"""CPU devices of one host: of one process, or of several that share memory."""

from typing import Any

import jax

from jaxcomm import _ffi
from jaxcomm.communicator import cpu_threads, neighbors
from jaxcomm.communicator.backends.backend import Backend, Choice


class HostBackend(Backend):
    """Moves bytes between CPU devices, whose groups each lie on one host."""

    name = "host"
    platforms = ("cpu",)

    def __init__(self):
        # Communicators of each key since finalize(), after which processes meet in
        # memory of its own: one made anew never meets its predecessor.
        self._generations: dict[int, int] = {}

    def choice(self, mesh, part) -> Choice | str:
        """Serves CPU devices, if the processes of each group share memory."""
        platform = mesh.devices.flat[0].platform
        if platform != "cpu":
            return f"it moves bytes of CPU devices, and these are {platform} devices"
        process_of = {device.id: device.process_index for device in mesh.devices.flat}
        spans = [{process_of[device] for device in group} for group in part.groups]
        if all(len(processes) == 1 for processes in spans):
            return Choice(self, "memory")
        everyone = tuple(sorted(set(process_of.values())))
        found = neighbors.find(everyone, jax.process_index())
        refusals = [found.refusal(processes) for processes in spans]
        refusal = next((text for text in refusals if text), None)
        if refusal is not None:
            return refusal
        index = {process: i for i, process in enumerate(found.members)}
        processes = tuple(
            tuple(index.get(process_of[device], -1) for device in group)
            for group in part.groups
        )
        return Choice(self, "shared memory", found, processes)

    def make(self, member, mesh, part, choice, live) -> dict[str, int]:
        """Makes it in the extension; in the memory its processes share, if several."""
        shared = {}
        if choice.neighbors is not None:
            generation = self._generations.get(member.key, 0)
            self._generations[member.key] = generation + 1
            shared = {
                "process_set": choice.neighbors.process_set,
                "processes": [list(ranks) for ranks in choice.processes],
                "generation": generation,
            }
        _ffi.create_host(
            key=member.key,
            axes=str(part.axes),
            lane=member.lane,
            platform=member.platform,
            timeout_seconds=member.timeout,
            groups=[list(group) for group in part.groups],
            hint_if_late=cpu_threads.shortage(),
            **shared,
        )
        return {"created": 1}

    def forget(self) -> None:
        """Processes that made some a different number of times are in step again."""
        self._generations.clear()

    def memory(self, member, live) -> dict[str, Any]:
        """Tells of the shared memory, which all between the same processes share."""
        if member.neighbors is None:
            return {}
        segment = member.neighbors.segment
        return {
            "shared_bytes": 0 if segment is None else segment.resident_bytes(),
            "shared": any(
                other is not member and other.neighbors is member.neighbors
                for other in live
            ),
        }
