"""Fixtures of tests that run parts of ``bench gpu`` over the stand-in."""

import ctypes
import dataclasses
import itertools
import json

import jax
import pytest

import jaxcomm
from bench.gpu import device_memory, sizes
from bench.gpu.timer import Timer
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


def grows(monkeypatch, function, step):
    """Has each look at device memory find more than the one before."""
    counted = itertools.count(0, step)
    monkeypatch.setattr(device_memory, function, lambda: next(counted))
