"""The devices that the demo runs on: virtual CPU devices unless told otherwise."""

import os

import jax

from jaxcomm import compat
from language_model import processes
from language_model.settings import DemoError
from language_model.step import AXES


def make_mesh(data: int, context: int, backend: str | None = None) -> jax.sharding.Mesh:
    """Make a mesh with the axes data and context, on virtual CPU devices.

    Where JAX_PLATFORMS names another platform, on the devices of that platform; on GPUs
    for the backend nccl, unless JAXCOMM_NCCL_LIBRARY names what serves CPU devices.
    Where there are several processes, on all devices of all of them: a ring stays
    within a process if it has enough devices, since every layer goes around it, and the
    gradients, which travel once in a step, cross.

    Raises:
      DemoError: jax has fewer devices and has started already, or several processes
        have another number of them.
    """
    wanted, count = data * context, processes.count()
    devices = _of_all(wanted, count) if count > 1 else _of_one(wanted, backend)
    automatic = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, context), AXES, axis_types=automatic, devices=devices)


def _of_one(wanted, backend):
    on_gpus = backend == "nccl" and not os.environ.get("JAXCOMM_NCCL_LIBRARY")
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        # jax has counted its devices already; there may be enough.
        pass
    else:
        chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        if not chosen and not on_gpus:
            jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices()
    except compat.NO_DEVICES as error:
        raise DemoError(
            f"jax finds no devices with JAX_PLATFORMS={jax.config.jax_platforms}"  # pyright: ignore[reportAttributeAccessIssue]
            f"{f': {error}' if str(error) else ''}. See python -m jaxcomm.doctor"
        ) from None
    if len(devices) < wanted:
        raise DemoError(
            f"{wanted} devices were asked for, but jax runs with {len(devices)} of "
            f"platform {devices[0].platform}. For virtual CPU devices start a fresh "
            "process with JAX_PLATFORMS=cpu; or pass a smaller --devices"
        )
    return devices[:wanted]


def _of_all(wanted, count):
    devices = jax.devices()
    if len(devices) != wanted:
        if wanted % count:
            remedy = f"as many as {count} processes can share evenly"
        else:
            remedy = f"start them with --devices-per-process={wanted // count}"
        raise DemoError(
            f"{wanted} devices were asked for, but {count} processes have "
            f"{len(devices)} together, all of which take part. Ask for {len(devices)}, "
            f"or {remedy}"
        )
    return devices
