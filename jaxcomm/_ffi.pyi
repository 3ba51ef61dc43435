"""XLA FFI handlers of jaxcomm and the registry of its communicators."""

from collections.abc import Sequence


def registrations() -> dict:
    """Custom-call targets and their handlers, by stage."""

def call_site_type() -> dict:
    """The type registration of the handlers' state."""

def create_host(key: int, axes: str, lane: str, platform: str, timeout_seconds: float, groups: Sequence[Sequence[int]]) -> None:
    """Makes a communicator of the host backend under a key."""

def destroy(key: int) -> None:
    """Ends a communicator; whoever waits in it gets an error."""

def stats(key: int) -> dict:
    """Calls and bytes of a communicator, empty if there is none."""

def counters() -> dict:
    """Communicators created, destroyed and live."""
