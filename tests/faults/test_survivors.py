"""A process is killed, or late. The others shrink their mesh and go on, in place."""

import pytest
import survival
from team import environment

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("case", ["killed", "late"])
@pytest.mark.parametrize("backend", ["host", "nccl"])
def test_survivors_go_on_with_their_parameters(backend, case, tmp_path, request):
    variables = environment()
    if backend == "nccl":
        path = request.getfixturevalue("stand_in_path")
        variables |= {"JAXCOMM_NCCL_LIBRARY": path, "JAXCOMM_BACKEND": "nccl"}
    survival.check(case, 3, tmp_path, variables)
