"""Threads, long runs and many calls: right, and without growth."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jaxcomm


def over(mesh, call, donate=()):
    spec = jax.P(tuple(mesh.axis_names))
    program = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(program, donate_argnums=donate)


def test_four_threads_dispatch_collectives_at_once(make_mesh, mesh_pair):
    """C7: on one mesh and on two, small ones and large ones."""
    straight, crossed = mesh_pair
    programs = []
    for mesh in (straight, crossed):
        programs += [
            (over(mesh, lambda x: jaxcomm.psum(x, ("a", "b"))), lambda x: x.sum(0)),
            (
                over(mesh, lambda x: jaxcomm.ring_shift(x, ("a", "b"))),
                lambda x: np.roll(x, 1, 0),
            ),
            (
                over(mesh, lambda x: jaxcomm.pscan(x, ("a", "b"))),
                lambda x: np.cumsum(x, 0),
            ),
        ]
    failures = []
    start = threading.Barrier(4)

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            start.wait(60)
            for _ in range(40):
                program, model = programs[rng.integers(len(programs))]
                width = int(rng.choice([1, 7, 40_000]))
                x = rng.integers(-9, 9, (8, width)).astype(np.float32)
                found = np.asarray(program(x))
                expected = np.broadcast_to(model(x), found.shape)
                np.testing.assert_array_equal(found, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert [c.stats()["in_flight"] for c in jaxcomm.communicators()] == [0, 0]


def test_threads_may_make_and_close_communicators_while_others_run(make_mesh):
    mesh, other = make_mesh(i=4), make_mesh(j=2)
    program = over(mesh, lambda x: jaxcomm.psum(x, "i"))
    x = np.ones((4, 3), np.float32)
    program(x)
    failures = []

    def churn():
        try:
            for turn in range(50):
                with jaxcomm.init(other, lanes=f"lane {turn % 3}")[0]:
                    str(jaxcomm.communicators())
                    jaxcomm.memory_report()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(200):
        np.testing.assert_array_equal(program(x), np.full((4, 3), 4.0))
    thread.join(60)
    assert not thread.is_alive()
    assert failures == []
    assert len(jaxcomm.communicators()) == 1


@pytest.fixture
def mesh_pair(make_mesh):
    """Meshes of the same eight devices in two orders."""
    straight = make_mesh(a=2, b=4)
    devices = straight.devices.ravel()[[3, 6, 1, 4, 7, 2, 5, 0]].reshape(2, 4)
    crossed = jax.sharding.Mesh(
        devices, straight.axis_names, axis_types=straight.axis_types
    )
    return straight, crossed


def test_a_thousand_broadcasts_in_one_program(make_mesh):
    """C8."""
    mesh = make_mesh(i=8)

    def call(x):
        def step(carry, root_value):
            # What each step sends depends on the last: none can be dropped.
            carry = jaxcomm.pbroadcast(carry + jax.lax.axis_index("i"), "i", 3)
            return carry, carry[0]

        return jax.lax.scan(step, x, length=1000)

    last, trace = over(mesh, lambda x: jax.tree.map(lambda y: y[None], call(x[0])))(
        np.arange(8, dtype=np.int32)[:, None]
    )
    # Rank 3 holds 3; each step adds its index, 3, on the root.
    np.testing.assert_array_equal(last, np.full((8, 1), 3 + 3 * 1000))
    np.testing.assert_array_equal(trace[5], 3 + 3 * np.arange(1, 1001))
    assert jaxcomm.communicators()[0].stats()["calls"] == {"broadcast": 1000}


def grown(what):
    """Returns what tests/growth.py says of it: bytes a round, bytes held, threads."""
    done = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("growth.py"), what],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return map(int, done.stdout.split())


def test_ten_thousand_calls_leak_nothing():
    """C12, C10: resident memory stays, nothing is left in flight."""
    resident, held, _ = grown("calls")
    # One tag entry left behind by each of four ranks would be 250 kB a round.
    assert resident < 128 << 10
    # A rank that is further ahead than any before it takes an entry more, once.
    assert held < 16 << 10


def test_threads_stay_few_though_another_process_takes_the_cores():
    """A rank that is preempted is not one that blocks."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count())
    ]
    try:
        *_, threads = grown("calls")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    # XLA itself has two or three for each of the eight devices and each core.
    assert threads < 64 + 8 * os.cpu_count()


def test_dispatching_thousands_of_programs_leaks_nothing():
    """C12: the way through Python and XLA's dispatch, not a loop inside."""
    resident, held, _ = grown("dispatches")
    # 160 bytes a call; XLA's own bookkeeping breathes by a page now and then.
    assert resident < 64 << 10
    assert held < 16 << 10


def test_making_and_closing_thousands_of_communicators_leaks_nothing():
    resident, _, _ = grown("communicators")
    # Each holds about a kilobyte while it lives.
    assert resident < 128 << 10
