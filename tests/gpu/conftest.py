"""What tests on NVIDIA GPUs share.

They also run in several processes, which pytest starts as ``test_acceptance.py`` says.
"""

import os

import jax
import pytest

import jaxcomm

# NCCL needs memory beside JAX's pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def ring():
    """All GPUs as one axis; the communicators end with the test."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    yield jax.make_mesh((len(gpus),), ("i",), devices=gpus)
    jaxcomm.finalize()
