"""Where the processes of a job meet, how one starts its devices and reads memory."""

import contextlib
import functools
import threading
from typing import Any

import jax

from jaxcomm.compat.needed import MODULES

_distributed = MODULES["jax._src.distributed"]
_xla_bridge = MODULES["jax._src.xla_bridge"]


def key_value_store() -> Any:
    """Return the client of ``jax.distributed``'s key-value store, None if none runs.

    It has ``key_value_set(key, text, allow_overwrite)``,
    ``blocking_key_value_get(key, milliseconds)`` and ``key_value_dir_get(folder)``,
    which returns the keys and texts of all entries below a folder at one moment.
    """
    return _distributed.global_state.client


def serve_jobs_store(address: str, processes: int) -> Any:
    """Serve what processes of ``jax.distributed`` meet in, until its ``shutdown()``.

    The end of a process does not end the others.
    """
    # Checked on 0.10.2, 0.12.0.1.
    return _distributed._jax.get_distributed_runtime_service(
        address, processes, recoverable=True
    )


class _ServedElsewhere:
    def shutdown(self):
        pass


@contextlib.contextmanager
def jobs_store_served_elsewhere():
    """Keep ``jax.distributed.initialize`` from serving the store in process 0."""
    # Checked on 0.10.2, 0.12.0.1.
    library = _distributed._jax
    serve = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = lambda *_, **__: _ServedElsewhere()
    try:
        yield
    finally:
        library.get_distributed_runtime_service = serve


def forget_topology() -> None:
    """Let process 0 start its devices again, which writes what all devices are.

    It writes that once, from what each process wrote of its own devices.
    """
    # Checked on 0.10.2, 0.12.0.1.
    for platform in ("cpu", "cuda", "gpu", "rocm"):
        key_value_store().key_value_delete(f"{platform}:global_topology")


def around_start_of_devices(before, after) -> None:
    """Call ``before()`` and ``after()`` once, when this process first asks for devices.

    If ``before`` raises, so does whatever asked, and the next one calls it again.
    """
    start = _xla_bridge.backends
    acting = threading.RLock()
    waiting = [before]
    following = [after]

    def act_then_start():
        with acting:
            if waiting:
                waiting[0]()
                waiting.clear()
                if _xla_bridge.backends is act_then_start:
                    _xla_bridge.backends = start
        found = start()
        with acting:
            if following:
                following.pop()()
        return found

    _xla_bridge.backends = act_then_start


def make_cpu_client_inside(context) -> bool:
    """Have JAX make its CPU client inside ``context()``, now and whenever it is anew.

    Returns:
      False if this JAX makes it in a way that is not known here.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    try:
        registration = _xla_bridge._backend_factories["cpu"]
        make = registration.factory

        @functools.wraps(make)
        def make_inside(*arguments, **options):
            with context():
                return make(*arguments, **options)

        registration.factory = make_inside
    except (AttributeError, KeyError):
        return False
    return True


def configured_cpu_devices() -> int | None:
    """Return how many CPU devices JAX was configured to have, None if it was not."""
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    configured = _xla_bridge.num_cpu_devices.value
    return configured if configured >= 0 else None


def from_dlpack(capsule, device) -> jax.Array:
    """Return the array of a DLPack capsule, on the device whose memory it is in.

    ``jax.dlpack.from_dlpack`` takes all CPU memory to belong to the first CPU device.

    Args:
      capsule: as ``__dlpack__()`` returns it.
      device: whose memory it is.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    from jax._src.lib import _jax

    stream = None
    if device.platform != "cpu":
        stream = device.get_stream_for_external_ready_events()
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, stream, None)


def around_compilation(before, after, elsewhere) -> bool:
    """Call ``after(before(), executable, processes)`` once anything is compiled.

    ``processes`` are those of the program's devices, in their order. ``elsewhere()`` is
    called once the program loads what another process compiled.

    Returns:
      False if this JAX compiles in a way that is not known here.
    """
    # Checked on 0.10.2, 0.11.2, 0.12.0.1.
    from jax._src import compiler
    from jax.experimental import serialize_executable

    try:
        compile_ = compiler.compile_or_get_cached
        load = serialize_executable.deserialize_and_load
    except AttributeError:
        return False

    @functools.wraps(compile_)
    def compile_then_tell(backend, computation, devices, *rest, **options):
        known = before()
        executable = compile_(backend, computation, devices, *rest, **options)
        after(known, executable, [each.process_index for each in devices.flat])
        return executable

    @functools.wraps(load)
    def tell_then_load(*arguments, **options):
        elsewhere()
        return load(*arguments, **options)

    compiler.compile_or_get_cached = compile_then_tell
    serialize_executable.deserialize_and_load = tell_then_load
    return True
