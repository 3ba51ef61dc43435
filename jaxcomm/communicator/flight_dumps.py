"""When this process writes its flight record by itself; see ``JAXCOMM_DUMP_DIR``."""

import atexit
import os
import sys
import threading

import jax

from jaxcomm import _ffi, config

_lock = threading.Lock()
_at_exit = False


def prepare(platform: str) -> bool:
    """Tells the extension who this process is and where its records go.

    Called whenever a communicator is made. From then on failures are dumped and
    SIGUSR1 is answered, in C++: a handler in Python would not run while the main
    thread waits in ``jax.block_until_ready``.

    Args:
      platform: of the communicator's devices, ``"cpu"``.

    Returns:
      Whether SIGUSR1 is answered: not if the program handles or ignores it itself.

    Raises:
      ValueError: the folder of ``JAXCOMM_DUMP_DIR`` cannot be written to.
    """
    global _at_exit
    folder = config.dump_dir()
    own = [device.id for device in jax.local_devices(backend=platform)]
    answers = _ffi.prepare_flight_dumps(
        process=jax.process_index(),
        processes=jax.process_count(),
        devices=[(platform, own)],
        folder=folder or "",
    )
    with _lock:
        if not _at_exit:
            # After the registration of jaxcomm.finalize, so it runs before.
            atexit.register(_dump_after_exception)
            os.register_at_fork(
                after_in_child=lambda: atexit.unregister(_dump_after_exception)
            )
            _at_exit = True
    return answers


def _dump_after_exception():
    # Set by Python when it has printed an exception that nobody caught. The others
    # will wait for this process: its record says how far it came.
    if getattr(sys, "last_value", None) is not None and config.dump_dir():
        _ffi.dump_flight_records("exit after failure")
