"""`python growth.py` repeats calls and prints by how much memory grew.

A process of its own, with nothing of other tests. For each kind of work it prints three
numbers: the median growth of a round in bytes, what communicators held more at the end,
and the threads of the process.
"""

import ctypes
import gc
import os

import jax
import models
import numpy as np

import jaxcomm


def resident_bytes():
    # Of holes that work before has left: what leaks must not hide in them.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def over(call, size):
    devices = jax.devices()[:size]
    return models.over(jax.sharding.Mesh(devices, ("i",)), call)


def calls():
    """A round is a thousand operations of one program."""

    def call(x):
        def step(x, _):
            x = jaxcomm.ring_shift(x, "i")
            x = jaxcomm.psum(x, "i") - jaxcomm.pmax(x, "i") * 3
            return jaxcomm.all_gather(x, "i", tiled=True).reshape(4, -1).mean(0), None

        return jax.lax.scan(step, x, length=250)[0]

    program = over(call, 4)
    x = np.ones((4 * 16,), np.float32)
    expected = np.asarray(program(x))

    def turn():
        np.testing.assert_array_equal(program(x), expected)

    return turn


def dispatches():
    """A round is a thousand programs of one operation each."""
    program = over(lambda x: jaxcomm.psum(x, "i"), 2)
    x = np.ones((2, 4), np.float32)

    def turn():
        for _ in range(1000):
            jax.block_until_ready(program(x))

    return turn


def communicators():
    """A round makes and closes 150 communicators."""
    mesh = jax.make_mesh(
        (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def turn():
        for _ in range(50):
            jaxcomm.init(mesh)
            jaxcomm.finalize()

    return turn


def measure(turn, rounds=5):
    for _ in range(8):  # the allocator's arenas, one for each thread, fill
        turn()
    held = [member.stats()["host_bytes"] for member in jaxcomm.communicators()]
    grown = []
    for _ in range(rounds):
        before = resident_bytes()
        turn()
        grown.append(resident_bytes() - before)
    stats = [member.stats() for member in jaxcomm.communicators()]
    assert all(each["in_flight"] == 0 for each in stats), stats
    more = sum(each["host_bytes"] for each in stats) - sum(held)
    jaxcomm.finalize()
    # The median: a leak shows in each round, what an allocator takes once in one.
    return sorted(grown)[rounds // 2], more, len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    for work in (calls, dispatches, communicators):
        print(work.__name__, *measure(work()))
