"""Threads, long runs and many calls: right, and without growth."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from concurrent import futures

import jax
import models
import numpy as np
import pytest
import waiting

import jaxcomm


@contextlib.contextmanager
def threads_of(*works):
    with futures.ThreadPoolExecutor(len(works)) as threads:
        begun = [threads.submit(work) for work in works]
        yield
        for each in begun:
            each.result(waiting.HANG_SECONDS)


def test_threads_dispatch_collectives_at_once(make_mesh):
    """C7: on the same devices in two orders, with small operands and large ones."""
    straight = make_mesh(a=2, b=4)
    devices = straight.devices.ravel()[[3, 6, 1, 4, 7, 2, 5, 0]].reshape(2, 4)
    crossed = jax.sharding.Mesh(
        devices, straight.axis_names, axis_types=straight.axis_types
    )
    both = ("a", "b")
    programs = [
        (models.over(mesh, call), model)
        for mesh in (straight, crossed)
        for call, model in (
            (lambda x: jaxcomm.psum(x, both), lambda x: x.sum(0)),
            (lambda x: jaxcomm.pscan(x, both), lambda x: x.cumsum(0)),
        )
    ]
    start = threading.Barrier(4)

    def work(seed):
        rng = np.random.default_rng(seed)
        start.wait(waiting.HANG_SECONDS)
        for _ in range(30):
            program, model = programs[rng.integers(len(programs))]
            width = int(rng.choice([7, 40_000]))
            x = rng.integers(-9, 9, (8, width)).astype(np.float32)
            found = np.asarray(program(x))
            expected = np.broadcast_to(model(x), found.shape)
            np.testing.assert_array_equal(found, expected)

    with threads_of(*(lambda seed=seed: work(seed) for seed in range(4))):
        pass
    assert [c.stats()["in_flight"] for c in jaxcomm.communicators()] == [0, 0]


def test_threads_that_make_the_same_communicators_make_each_once(make_mesh):
    """C7: look-up and creation are one step."""
    mesh = make_mesh(i=4)
    before = jaxcomm.communicators().counters.created
    start = threading.Barrier(4)

    def work():
        for turn in range(60):
            start.wait(waiting.HANG_SECONDS)
            jaxcomm.init(mesh, "i", lanes=f"lane {turn}")
            jaxcomm.communicators().counters, str(jaxcomm.communicators())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with threads_of(*[work] * 4):
            pass
    finally:
        sys.setswitchinterval(interval)
    assert jaxcomm.communicators().counters.created - before == 60


def test_threads_may_make_and_close_communicators_while_others_run(make_mesh):
    mesh, other = make_mesh(i=4), make_mesh(j=2)
    program = models.over(mesh, lambda x: jaxcomm.psum(x, "i"))
    x = np.ones((4, 3), np.float32)
    program(x)

    def churn():
        for turn in range(50):
            with jaxcomm.init(other, lanes=f"lane {turn % 3}")[0]:
                str(jaxcomm.communicators())
                jaxcomm.memory_report()

    with threads_of(churn):
        for _ in range(200):
            np.testing.assert_array_equal(program(x), np.full((4, 3), 4.0))
    assert len(jaxcomm.communicators()) == 1


@pytest.mark.multiprocess
@pytest.mark.slow
def test_calls_dispatches_and_communicators_leak_nothing():
    """C12, C10."""
    done = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("growth.py")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=2 * waiting.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    found = {name: list(map(int, numbers)) for name, *numbers in rows}
    # One tag entry left behind by each of four ranks would be 250 kB a round of calls.
    # A dispatch that leaked 128 bytes shows; XLA's own bookkeeping breathes by pages.
    # A communicator holds about a kilobyte while it lives.
    most = {"calls": 128 << 10, "dispatches": 128 << 10, "communicators": 96 << 10}
    for name, bound in most.items():
        resident, held, threads = found[name]
        assert resident < bound, name
        # A rank that is further ahead than any before it takes an entry more, once.
        assert held < 16 << 10, name
        # XLA itself has two or three for each of the eight devices and each core.
        assert threads < 64 + 8 * os.cpu_count(), name
