"""The PTX that is checked in serves the GPUs that we promise.

That it is what the GPU code compiles to: `make lint`.
"""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "make_ptx.py"


def test_the_drivers_and_gpus_that_we_promise_take_it():
    # In a process of its own: NVRTC sets the locale of the process.
    words = [sys.executable, TOOL, "--ptx"]
    ptx = subprocess.run(words, capture_output=True, text=True).stdout
    # ISA 8.0 is what the driver of CUDA 12.0 takes at most.
    assert re.search(r"^\.version 8\.0$", ptx, re.MULTILINE)
    assert re.search(r"^\.target sm_70$", ptx, re.MULTILINE)
    kernels = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    sums = ["int32", "float32", "float16", "bfloat16"]
    assert sorted(kernels) == sorted(
        ["jaxcomm_stop", "jaxcomm_poison", *(f"jaxcomm_sum_{each}" for each in sums)]
    )
    # Lines stay in registers, and arguments where they are.
    assert ".local" not in ptx
    assert ".func" not in ptx
