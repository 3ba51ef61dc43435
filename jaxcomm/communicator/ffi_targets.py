"""Makes the custom calls of the extension known to XLA."""

import threading

import jax

from jaxcomm import _ffi

_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str) -> None:
    """Registers handlers and their state's type for devices of a platform, once.

    Not at import: until a client exists jaxlib keeps registrations in two queues and
    then takes the handlers first, which fails because they name the type
    (0.10.2 to 0.12.0.1). Whoever has a device to communicate with has a client.
    """
    platform = {"gpu": "CUDA"}.get(platform, platform)
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
