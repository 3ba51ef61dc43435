"""Run the code it is given, in a process of its own: ``program.py CODE``."""
# ruff: noqa: F401 -- the code uses them.

import ctypes
import json
import os
import signal
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import waiting
from fault_suite import impatient

import jaxcomm

P = jax.P
stand_in = ctypes.CDLL(os.environ["JAXCOMM_NCCL_LIBRARY"])
stand_in.jaxcommFakeTrace.restype = ctypes.c_char_p


def mesh_of(count):
    """Return a mesh over one axis, "i"."""
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("i",), axis_types=auto, devices=devices)


def jitted(call, mesh):
    """Return a program of one call, split and joined over the mesh."""
    return jax.jit(
        jax.shard_map(
            call, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False
        )
    )


def trace(*names):
    """Return the calls so far, of some functions or of all."""
    lines = stand_in.jaxcommFakeTrace().decode().splitlines()
    return [c for c in map(json.loads, lines) if not names or c["name"] in names]


def until_called(function, count):
    """Wait for so many calls of a function of the stand-in."""
    waiting.until(lambda: len(trace(function)) >= count, function)


def error_of(action):
    """Return what an action raises, "" if nothing."""
    try:
        jax.block_until_ready(action())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tell(value):
    """Hand a value to the test."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    exec(sys.argv[1])
