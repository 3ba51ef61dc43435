"""C7: Python threads that dispatch at once, each in a lane of its own.

XLA's own collectives give wrong sums here where every process has one device.
"""

import threading

import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

WIDTHS = (3, 40_000)


def threads_with_a_lane_each(here, devices, compiled):
    mesh = here.mesh(2, devices)
    if mesh is None:
        return
    count = 4
    lanes = [f"lane {n}" for n in range(count)]
    jaxcomm.init(mesh, lanes=lanes)

    def make(lane, factor):
        def total(x):
            return jaxcomm.psum(x, "i", lane=lane) * factor

        return here.program(mesh, total)

    programs = [make(lane, n + 1) for n, lane in enumerate(lanes)]
    if compiled:
        for program in programs:
            for width in WIDTHS:
                x = np.zeros((mesh.size, width), np.int32)
                here.mine(program(here.put(mesh, x)))
    turns = Turns(count)
    failures = []

    def work(n):
        try:
            for k in range(25):
                x = here.values("int32", (mesh.size, WIDTHS[k % 2]), 25 * n + k)
                operand = here.put(mesh, x)
                if devices == 1:
                    found = programs[n](operand)
                else:
                    with turns.wait_for(n):
                        found = programs[n](operand)
                total = (x.sum(0, np.int32) * np.int32(n + 1)).astype(np.int32)
                expected = np.broadcast_to(total, x.shape)
                here.identical(mesh, here.mine(found), expected, f"thread {n}")
        except BaseException as error:
            turns.abandon()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    # Another order on every process.
    for thread in threads if here.process == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Turns:
    """Lets threads dispatch one after the other, round and round."""

    def __init__(self, count):
        self._count = count
        self._next = 0
        self._changed = threading.Condition()

    def wait_for(self, number):
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._next in (number, None), timeout=60
            )
        assert done, "another thread did not take its turn"
        assert self._next is not None, "another thread failed"
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._changed:
            if self._next is not None:
                self._next = (self._next + 1) % self._count
            self._changed.notify_all()

    def abandon(self):
        with self._changed:
            self._next = None
            self._changed.notify_all()


def test_threads_dispatch_in_any_order_where_processes_have_one_device(start_team):
    # XLA runs what is not small in a pool of as many threads as there are cores, each
    # of which waits for its program: more programs at a time would wait for ever.
    team = start_team(2, 1, {"NPROC": "8"})
    for compiled in (True, False):
        team.call(threads_with_a_lane_each, devices=1, compiled=compiled)


def test_threads_that_agree_on_an_order_may_wait_at_the_same_time(team):
    """XLA launches programs of several devices of a process one after the other, so
    processes that dispatch in different orders wait for each other until the deadline.
    """
    team.call(threads_with_a_lane_each, devices=2, compiled=False)
