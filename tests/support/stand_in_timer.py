"""Fixtures of tests that run parts of ``bench gpu`` over the stand-in."""

import dataclasses
import itertools

import jax
import pytest

from bench.gpu import device_memory, sizes
from bench.gpu.timer import Timer

TINIEST = dataclasses.replace(
    sizes.TINY, dtypes=("int8",), lengths=2, soak=80, rounds=1
)


@pytest.fixture
def timer(stand_in):
    """Two ranks over the stand-in, in this process."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), auto, devices=jax.devices()[:2])
    return Timer(mesh, TINIEST)


@pytest.fixture
def trace(stand_in):
    """Gives ``trace(name)``: the stand-in's calls of a function in this test."""
    return stand_in.trace


def grows(monkeypatch, function, step):
    """Has each look at device memory find more than the one before."""
    counted = itertools.count(0, step)
    monkeypatch.setattr(device_memory, function, lambda: next(counted))
