"""A process of several that adds up without end, until another one is killed."""

import itertools
import json
import os
import sys
import time

import jax
import numpy as np

import jaxcomm
from jaxcomm.launch import child

# By then the operations follow each other closely.
_WARM_UP = 10


def main(launcher: int, payload: int) -> None:
    """Says when it is under way, and what it raised when, if it does not end itself.

    Args:
      launcher: the process to end with.
      payload: bytes of each operand.
    """
    child.die_with(launcher)
    devices = np.array(jax.devices())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(devices, ("i",), axis_types=auto)
    jaxcomm.init(mesh)
    split = jax.P("i")
    program = jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=split, out_specs=split,
            check_vma=False,
        )
    )  # fmt: skip
    x = jax.make_array_from_callback(
        (len(devices), payload // 4),
        jax.NamedSharding(mesh, split),
        lambda _: np.ones((1, payload // 4), np.float32),
    )
    try:
        for turn in itertools.count():
            jax.block_until_ready(program(x))
            if turn == _WARM_UP:
                _say(under_way=True)
    except Exception as error:
        _say(at=time.monotonic(), text=str(error))
    # At once: nobody is left to meet at the end.
    os._exit(0)


def _say(**what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
