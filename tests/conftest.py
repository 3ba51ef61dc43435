"""Eight virtual CPU devices for every test, and nothing left behind by any."""

import os

# Before the first import of jax: the devices are counted when its client starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

import jaxcomm

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def fresh_communicators():
    """Starts and ends each test without communicators, compiled programs or choices."""
    jaxcomm.finalize()
    yield
    jaxcomm.finalize()


@pytest.fixture
def make_mesh():
    """Returns ``make_mesh(a=2, b=4)``: a mesh with Auto axes of those sizes."""

    def make(**axes):
        devices = jax.devices()
        size = 1
        for extent in axes.values():
            size *= extent
        return jax.make_mesh(
            tuple(axes.values()),
            tuple(axes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
            devices=devices[:size],
        )

    return make
