"""A process of several GPUs is killed, late or hung. The others go on, on theirs.

Each prints lines that begin with VERDICT, and figures: `make gpu-test
ARGS="-k survivors -s"` shows them.
"""

import pytest
import survival
from fault_suite import runner
from gpu_count import count_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


# What hangs on the host alone, which CPU devices show as well: tests/faults.
OF_HOSTS = "loops", "callback", "compiles", "writes"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.thorough] if case in OF_HOSTS else [])
        for case in survival.CASES
    ],
)
def test_survivors_raise_and_go_on_within_seconds(case, tmp_path):
    count = count_gpus()
    if count < survival.processes(case, 2):
        pytest.skip(f"needs {survival.processes(case, 2)} NVIDIA GPUs")
    variables = runner.inherited() | runner.on_gpus().variables
    survival.check(case, count, tmp_path, variables, size=1 << 24)
