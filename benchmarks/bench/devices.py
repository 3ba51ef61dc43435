"""Virtual CPU devices, meshes over some of them, and arrays laid out on these."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "ring"
_COUNT_FLAG = "--xla_force_host_platform_device_count"


def simulate(count: int) -> None:
    """Make this process have that many CPU devices. Before the first use of one.

    XLA reads the variable when its client starts, not when jax is imported.

    Raises:
      RuntimeError: jax has started its devices already.
    """
    others = re.sub(rf"{_COUNT_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{others} {_COUNT_FLAG}={count}".strip()
    jax.config.update("jax_platforms", "cpu")
    if len(jax.devices()) < count:
        raise RuntimeError(
            f"{count} CPU devices were asked for, but jax has started with "
            f"{len(jax.devices())}. Call simulate before any other use of jax."
        )


def mesh_of(count: int) -> jax.sharding.Mesh:
    """Return a mesh of the first ``count`` devices along the axis ``AXIS``."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), (AXIS,), auto, devices=jax.devices()[:count])


def place(x, mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """Put an array where the timed function wants it, so that no call moves it."""
    return jax.block_until_ready(jax.device_put(x, jax.NamedSharding(mesh, spec)))


def small_integers(shape: tuple[int, ...], dtype=jnp.float32) -> np.ndarray:
    """Return 0 to 6 at random: sums over ranks are exact, and no two ranks alike."""
    integers = np.random.default_rng(0).integers(0, 7, shape, dtype=np.int8)
    return integers.astype(np.float32).astype(dtype)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return float32 noise of variance one."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
