"""What tests on NVIDIA GPUs share."""

import jax
import pytest

import jaxcomm


@pytest.fixture
def ring():
    """All GPUs as one axis; the communicators end with the test."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    yield jax.make_mesh((len(gpus),), ("i",), devices=gpus)
    jaxcomm.finalize()
