"""The processes of a run: one, or several that a launcher started."""

import itertools
import json
import os
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

import jaxcomm
from jaxcomm import compat
from jaxcomm.communicator import hosts

# One look into the store; Ctrl-C is seen in between.
_SLICE_MILLISECONDS = 1000

Answer = TypeVar("Answer")
_questions = itertools.count()
_first = 0


def count() -> int:
    """Return the number of processes.

    Starts jax's devices where there are several; a process alone may still choose how
    many it wants.
    """
    if not jax.distributed.is_initialized():
        if int(os.environ.get("JAX_NUM_PROCESSES") or 1) == 1:
            return 1
        jax.distributed.initialize()
    return jax.process_count()


def is_first() -> bool:
    """Say whether this process prints, draws and writes for all of them."""
    return count() == 1 or jax.process_index() == _first


def go_on(mesh: jax.sharding.Mesh) -> None:
    """Have the first process that a mesh has left speak for the others."""
    global _first
    _first = min(device.process_index for device in mesh.devices.flat)


def was_restarted() -> bool:
    """Say whether the launcher started this run before, and it failed."""
    return int(os.environ.get("JAXCOMM_RESTART_COUNT") or 0) > 0


def run_id() -> str:
    """Return what names the run of a launcher, all its attempts; empty without one."""
    return os.environ.get("JAXCOMM_RUN_ID") or ""


def from_first(compute: Callable[[], Answer]) -> Answer:
    """Return in every process what a function returns in the first; the others wait.

    Every process must call this, with functions in the same order.

    Args:
      compute: called in the first process; returns what JSON can hold. May take longer
        than a collective waits.

    Raises:
      CommunicatorError: the first process has ended, and the launcher tells so.
    """
    if count() == 1:
        return compute()
    store = compat.key_value_store()
    assert store is not None  # there are several processes
    key = f"language_model/{next(_questions)}"
    if is_first():
        answer = compute()
        store.key_value_set(key, json.dumps(answer))
        return answer
    while True:
        # Before the look: it may answer, and then end.
        has_ended = _first in hosts.told_ends()
        try:
            return json.loads(store.blocking_key_value_get(key, _SLICE_MILLISECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if has_ended:
            raise jaxcomm.CommunicatorError(
                f"process {_first}, which answers the others, has ended"
            )


def put(tree, sharding: jax.sharding.Sharding):
    """Put arrays that every process holds on the devices of all of them.

    ``jax.device_put`` would first compare the processes' arrays, with a collective of
    XLA.

    Args:
      tree: pytree of arrays, the same in every process.
      sharding: where they go.
    """

    def one(leaf):
        array = np.asarray(leaf)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )

    return jax.tree.map(one, tree)
