"""Whether the others count on this process, after it was started again."""

from collections.abc import Callable

from jaxcomm import config
from jaxcomm.errors import CommunicatorError

_is_taken_in = False
# How the launcher learns of it.
_tell_launcher: Callable[[], object] | None = None


def tell_of_joining(tell: Callable[[], object] | None) -> None:
    """Have ``tell()`` called once the others have taken in this process."""
    global _tell_launcher
    _tell_launcher = tell


def is_taken_in() -> bool:
    """Return whether the others have taken it in."""
    return _is_taken_in


def take_in_this() -> None:
    """Say that the others have taken in this process, and miss it if it ends."""
    global _is_taken_in
    _is_taken_in = True
    if _tell_launcher is not None:
        _tell_launcher()


def check_taken_in(me: int, what: str) -> None:
    """Raise CommunicatorError if this process was started again and not taken in.

    It would take the others for lost, and they do not wait for it.
    """
    if config.starts() and not _is_taken_in:
        raise CommunicatorError(
            f"{what}, and process {me} was started again and not taken in by the "
            f"others. Call jaxcomm.grow first. If it has raised, end this process"
        )
