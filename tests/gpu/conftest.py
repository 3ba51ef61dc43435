"""What tests on NVIDIA GPUs share, and the stand-in's devices where there is no GPU.

`make gpu-test` runs them on GPUs. `make test` runs them in tiny sizes on CPU devices
over the stand-in for NCCL, so that no change of the API breaks them unseen.

`make gpu-test ARGS=--each` runs most of them with a process for each GPU: there all
processes run the same tests, in step.
"""

import os
import pathlib
import tempfile

import jax
import pytest

import jaxcomm

# pytest clears old folders, and stumbles where others of the job do so, too.
if _PROCESS := os.environ.get("JAX_PROCESS_ID"):
    _FOLDER = os.path.join(tempfile.gettempdir(), f"jaxcomm-tests-{_PROCESS}")
    os.makedirs(_FOLDER, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _FOLDER
# NCCL needs memory beside JAX's pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_runtest_logstart(nodeid):
    """Tell tools/gpu_test.py which file this process of a job is at."""
    if folder := os.environ.get("JAXCOMM_TEST_REACHED"):
        at = pathlib.Path(folder, os.environ.get("JAX_PROCESS_ID", "0"))
        at.write_text(pathlib.Path(nodeid.partition("::")[0]).name)


@pytest.fixture(scope="session")
def gpus():
    """All GPUs; none on a machine of CPUs alone."""
    return [device for device in jax.devices() if device.platform == "gpu"]


@pytest.fixture
def ring(gpus, request):
    """All GPUs as one axis, or two devices of the stand-in, or all processes'."""
    if len(gpus) == 1:
        pytest.skip("needs two NVIDIA GPUs")
    devices = gpus
    if not gpus:
        request.getfixturevalue("with_kernels")
        many = os.environ.get("JAXCOMM_TEST_RANKS", "2")
        devices = jax.devices()[: int(many) if jax.process_count() == 1 else None]
    yield jax.make_mesh((len(devices),), ("i",), devices=devices)
    jaxcomm.finalize()
