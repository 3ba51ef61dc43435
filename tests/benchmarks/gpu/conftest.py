"""``python -m bench gpu`` on CPU devices, over the stand-in for NCCL."""

import json
import os
import sys

import forked
import jax
import pytest
import waiting

from bench.gpu import record
from bench.gpu.sizes import TINY
from bench.gpu.timer import Timer


@pytest.fixture
def timer(stand_in):
    """Two ranks over the stand-in, in this process."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), auto, devices=jax.devices()[:2])
    return Timer(mesh, TINY)


@pytest.fixture
def bench_gpu(stand_in_path, tmp_path):
    """Gives ``bench_gpu(*words, **variables)``: what became of the command."""
    report = tmp_path / "report.json"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "NCCL_", "XLA_FLAGS"))
    }

    def run(*words, **variables):
        asked = {
            "JAXCOMM_NCCL_LIBRARY": stand_in_path,
            "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
            "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
        }
        done = forked.run(
            [sys.executable, "-W", "error", "-m", "bench", "gpu", *words,
             "--json", report],
            env=inherited | asked | variables,
            capture_output=True,
            text=True,
            timeout=waiting.HANG_SECONDS,
            check=False,
        )  # fmt: skip
        done.report = json.loads(report.read_text()) if report.exists() else None
        done.rows = record.all_rows(done.report) if done.report else []
        return done

    return run
