"""What the extension needs before the first communicator of a platform is made."""

import atexit
import sys
import threading

import jax

from jaxcomm import config
from jaxcomm._built import _ffi
from jaxcomm.communicator import forks, stacks

_lock = threading.Lock()
_registered: set[str] = set()
_dumps_at_exit = False


def prepare(platform: str, ffi_platform: str) -> bool:
    """Make custom calls known to XLA, and flight records ready to be written.

    Call it whenever a communicator is made. From then on the extension writes flight
    records of failures and answers SIGUSR1, in C++: a handler in Python would not run
    while the main thread waits in ``jax.block_until_ready``. See ``JAXCOMM_DUMP_DIR``.

    Returns:
      Whether SIGUSR1 is answered. It is not if the program handles or ignores it.

    Raises:
      ValueError: the folder of ``JAXCOMM_DUMP_DIR`` cannot be written to.
    """
    _register_targets(ffi_platform)
    return _prepare_flight_dumps(platform)


def _register_targets(platform: str) -> None:
    """Register handlers and the type of their state, once for each platform.

    Not at import: until a client exists jaxlib keeps registrations in two queues. It
    then takes the handlers first, and fails because they name the type (0.10.2 to
    0.12.0.1). By the time a communicator exists, a client does.
    """
    with _lock:
        if platform in _registered:
            return
        types = _ffi.call_site_type()
        jax.ffi.register_ffi_type(
            "jaxcomm.CallSite",
            {"type_id": types["type_id"], "type_info": types["type_info"]},
            platform=platform,
        )
        for target, stages in _ffi.registrations(platform != "cpu").items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)
        _registered.add(platform)


def _prepare_flight_dumps(platform: str) -> bool:
    global _dumps_at_exit
    folder = config.dump_dir()
    own = [device.id for device in jax.local_devices(backend=platform)]
    stacks.serve()
    answers = _ffi.prepare_flight_dumps(
        process=jax.process_index(),
        processes=jax.process_count(),
        devices=[(platform, own)],
        folder=folder or "",
        says=not config.is_launched(),
    )
    with _lock:
        if not _dumps_at_exit:
            # After the registration of jaxcomm.finalize, so it runs before.
            atexit.register(_dump_after_exception)
            forks.in_child(lambda: atexit.unregister(_dump_after_exception))
            _dumps_at_exit = True
    return answers


def _dump_after_exception() -> None:
    # Python sets it when it has printed an exception that nobody caught. The others
    # will wait for this process: its record says how far it came.
    if getattr(sys, "last_value", None) is not None and config.dump_dir():
        _ffi.dump_flight_records("exit after failure")


def dump_at_end() -> None:
    """Write what a process did that ends well, if it is one of several.

    Others may wait for what it did not do. Its communicators are closed by now.
    """
    is_prepared = _dumps_at_exit and getattr(sys, "last_value", None) is None
    if is_prepared and config.dump_dir() and jax.process_count() > 1:
        _ffi.dump_flight_records("exit")


def answer_early(process: int, processes: int) -> None:
    """Answer SIGUSR1 before there is a communicator, in a process that was launched."""
    stacks.serve()
    _ffi.prepare_flight_dumps(process, processes, [], config.dump_dir() or "", False)
