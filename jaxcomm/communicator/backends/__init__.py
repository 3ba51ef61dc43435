"""Which backend serves a partition, and over which transport.

A decision that differed between processes would be a deadlock: it depends on the
arguments, on the environment, which is to be the same everywhere, and on what all
processes of the mesh told each other.
"""

from jaxcomm import config
from jaxcomm.communicator.backends.backend import Backend as Backend
from jaxcomm.communicator.backends.backend import Choice as Choice
from jaxcomm.communicator.backends.host import HostBackend
from jaxcomm.communicator.backends.nccl.backend import NcclBackend
from jaxcomm.communicator.backends.xla import XlaBackend
from jaxcomm.errors import CommunicatorError

_XLA = XlaBackend()
BACKENDS: dict[str, Backend] = {
    each.name: each for each in (HostBackend(), NcclBackend(), _XLA)
}
NAMES = tuple(BACKENDS)


def choose(mesh, part, lane: str, backend: str | None) -> Choice:
    """Returns what serves the partition of a mesh.

    Where nobody chose a backend and that of the platform cannot, XLA does. Processes
    may have to meet first: each of those of the mesh must ask.

    Raises:
      ValueError: if there is no such backend.
      CommunicatorError: if it cannot serve these devices, or processes did not come.
    """
    backend = config.backend() if backend is None else backend
    if backend is None:
        return _by_platform(mesh, part)
    if backend not in BACKENDS:
        raise ValueError(
            f"backend {backend!r} is unknown; choose one of {NAMES}, or None to let "
            f"the platform choose"
        )
    found = BACKENDS[backend].choice(mesh, part)
    if isinstance(found, Choice):
        return found
    raise CommunicatorError(
        f"backend {backend!r} cannot join the groups of axes {part.axes} (lane "
        f"{lane!r}): {found}. Use backend='xla', or None to let the platform choose."
    )


def _by_platform(mesh, part):
    platform = mesh.devices.flat[0].platform
    for each in BACKENDS.values():
        if platform in each.platforms:
            found = each.choice(mesh, part)
            return Choice(_XLA, f"xla: {found}") if isinstance(found, str) else found
    return _XLA.choice(mesh, part)
