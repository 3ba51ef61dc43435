"""Right and steady over NCCL on all GPUs: of this process, or of several.

For several processes, put ``python -m jaxcomm.launch -n 2 --platform cuda -m`` before
``pytest tests/gpu/test_acceptance.py``. ``JAXCOMM_TEST_SOAK`` is the number of
operations of the soak.
"""

import dataclasses
import os

import jax
import pytest
from gpu_acceptance import PARTS
from stand_in_timer import TINIEST

from bench.gpu.sizes import Sizes
from bench.gpu.timer import Timer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", PARTS)
def test_all_is_right_and_steady(ring, gpus, part):
    sizes = Sizes() if gpus else TINIEST
    soak = int(os.environ.get("JAXCOMM_TEST_SOAK", sizes.soak))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(ring.devices, ring.axis_names, axis_types=auto)
    timer = Timer(mesh, dataclasses.replace(sizes, soak=soak))
    rows = list(PARTS[part](timer))
    assert rows
    wrong = {row.name: row.found for row in rows if row.is_right is False}
    assert wrong == {}
