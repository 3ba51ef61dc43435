"""A process of two GPUs is killed, or late. The other keeps its GPU and goes on.

Each prints lines that begin with VERDICT, and figures: `make gpu-test
ARGS="-k survivors -s"` shows them.
"""

import pytest
import survival
from fault_suite import runner
from gpu_count import count_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize("case", ["killed", "late"])
def test_survivors_raise_within_a_second_and_go_on(case, tmp_path):
    count = count_gpus()
    if count < 2:
        pytest.skip("needs two NVIDIA GPUs")
    variables = runner.inherited() | runner.on_gpus().variables
    survival.check(case, count, tmp_path, variables, size=1 << 24)
