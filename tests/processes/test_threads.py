"""C7: threads of several processes that dispatch in another order."""

import concurrent.futures
import time

import jax
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def two_functions_in_another_order(here):
    mesh = here.mesh(2, 1)
    split = jax.P("i")

    def first(x):
        return jaxcomm.psum(x, "i")

    def second(x):
        return jaxcomm.psum(x, "i")

    programs = [
        jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
            )
        )
        for f in (first, second)
    ]
    for program in programs:  # compiled, in one order
        here.mine(program(*here.put(mesh, [np.zeros((2, 3), np.int32)])))

    def run(n, operand):
        placed = here.put(mesh, operand)
        # The second first in process 1.
        if n != here.process:
            time.sleep(0.2)
        found = programs[n](placed)
        expected = np.broadcast_to(operand.sum(0, np.int32), (2, 3))
        here.identical(mesh, here.mine(found), expected, f"function {n}")

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for turn in range(5):
            operands = [here.values("int32", (2, 3), 2 * turn + n) for n in range(2)]
            list(threads.map(run, range(2), operands))


def test_functions_of_different_names_are_told_apart(start_team):
    """C7: two threads that dispatch them in another order on each process."""
    start_team(2, 1, {"NPROC": "8", "JAXCOMM_TIMEOUT": "20"}).call(
        two_functions_in_another_order
    )
