"""``python -m jaxcomm.bench gpu`` on CPU devices, over the stand-in for NCCL."""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

import jaxcomm
from jaxcomm.bench.gpu import sizes
from jaxcomm.bench.gpu.timer import Timer
from jaxcomm.communicator.backends.nccl import library

TINIEST = dataclasses.replace(
    sizes.TINY, dtypes=("int8",), lengths=2, soak=80, rounds=1
)


@pytest.fixture
def timer(stand_in_path, monkeypatch):
    """Two ranks over the stand-in, in this process."""
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    monkeypatch.setenv("JAXCOMM_BACKEND", "nccl")
    monkeypatch.setattr("jaxcomm.config.BACKEND", "nccl")
    library.load.cache_clear()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), auto, devices=jax.devices()[:2])
    yield Timer(mesh, TINIEST)
    # Before the library is out of sight again.
    jaxcomm.finalize()
    library.load.cache_clear()


@pytest.fixture
def trace(stand_in_path):
    """Gives ``trace(name)``: the stand-in's calls of a function in this test."""
    stand_in = ctypes.CDLL(stand_in_path)
    stand_in.jaxcommFakeTrace.restype = ctypes.c_char_p
    stand_in.jaxcommFakeClearTrace()

    def calls(name):
        lines = stand_in.jaxcommFakeTrace().decode().splitlines()
        return [call for call in map(json.loads, lines) if call["name"] == name]

    return calls


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
            "JAXCOMM_TIMEOUT": "60",
            "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
        }
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "jaxcomm.bench", "gpu", *words,
             "--json", report],
            env=inherited | asked | variables,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )  # fmt: skip
        done.report = json.loads(report.read_text()) if report.exists() else None
        return done

    return run
