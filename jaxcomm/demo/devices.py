"""The devices that the demo runs on: virtual CPU devices unless told otherwise."""

import jax

from jaxcomm.demo.settings import DemoError
from jaxcomm.demo.step import AXES


def make_mesh(data: int, context: int) -> jax.sharding.Mesh:
    """Make a mesh with the axes data and context, on virtual CPU devices.

    Where JAX_PLATFORMS names another platform, on the devices of that platform.

    Raises:
      DemoError: jax has fewer devices and has started already.
    """
    wanted = data * context
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        # jax has counted its devices already; there may be enough.
        pass
    else:
        if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) < wanted:
        raise DemoError(
            f"{wanted} devices were asked for, but jax runs with {len(devices)} of "
            f"platform {devices[0].platform}. For virtual CPU devices start a fresh "
            "process with JAX_PLATFORMS=cpu; or pass a smaller --devices"
        )
    automatic = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (data, context), AXES, axis_types=automatic, devices=devices[:wanted]
    )
