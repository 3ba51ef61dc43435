"""What the processes of a mesh agree on before they call NCCL together."""

from collections.abc import Callable
from typing import Any

import jax

from jaxcomm._built import _ffi
from jaxcomm.communicator import rendezvous
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.backends.nccl import devices
from jaxcomm.errors import CommunicatorError

# Why NCCL cannot serve devices of a platform, by the processes that agreed on it.
_refusals: dict[tuple[tuple[int, ...], str], str | None] = {}


def check_not_stopped() -> None:
    """Raise CommunicatorError if a failure stopped the GPUs of this process."""
    try:
        _ffi.refuse_if_stopped()
    except RuntimeError as error:
        raise CommunicatorError(str(error)) from None


def refusal(mesh: jax.sharding.Mesh) -> str | None:
    """Return why NCCL cannot serve the mesh, None if it can; alike on all processes.

    Every process of the mesh must call this.
    """
    check_not_stopped()
    platform = mesh.devices.flat[0].platform
    mine = devices.refusal(platform)
    processes = processes_of(mesh)
    if len(processes) == 1:
        return mine
    if (processes, platform) not in _refusals:
        answers = exchange(mesh, "whether NCCL can serve", mine)
        refused = (f"process {p}: {text}" for p, text in answers.items() if text)
        _refusals[processes, platform] = next(refused, None)
    return _refusals[processes, platform]


def exchange(mesh: jax.sharding.Mesh, what: str, value: Any) -> dict[int, Any]:
    """Return what each process of a mesh gave; all of them call this.

    Arguments and errors are those of :func:`jaxcomm.communicator.rendezvous.exchange`.
    """
    return rendezvous.exchange(processes_of(mesh), jax.process_index(), what, value)


def check_none_refused(mesh: jax.sharding.Mesh, what: str, refused: str | None) -> None:
    """Raise on every process of a mesh if one of them was refused something."""
    answers = exchange(mesh, what, refused)
    for process, text in answers.items():
        if text is not None:
            who = f" (process {process})" if len(answers) > 1 else ""
            raise CommunicatorError(f"{what}{who}: {text}")


def forget(is_over: Callable[[tuple[int, ...]], bool]) -> None:
    """Ask again whether NCCL can serve."""
    for processes, platform in [each for each in _refusals if is_over(each[0])]:
        del _refusals[processes, platform]
