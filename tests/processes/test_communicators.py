"""How many communicators there are, what they hold, and what remains of them."""

import ctypes
import itertools
import os

import jax
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

ROUNDS = 20
M_MMAP_THRESHOLD = -3  # of malloc.h


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mappings():
    sizes = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "jaxcomm" in line and ("memfd:" in line or "/dev/shm/" in line):
                begin, end = line.split()[0].split("-")
                sizes.append(int(end, 16) - int(begin, 16))
    return sizes


def made():
    counters = jaxcomm.communicators().counters
    return np.array([counters.created, counters.destroyed, counters.live])


def twenty_lengths(here, mesh):
    # Large blocks go back to the system at once. Otherwise the arenas of threads keep
    # some, and by luck grow in one pass after the other.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    before = made()
    run = here.program(mesh, lambda x: jaxcomm.psum(x, "i"))
    lengths = [500_000 + 1009 * k for k in range(20)]
    operands = [here.put(mesh, np.ones((4, n), np.float32)) for n in lengths]

    def all_lengths():
        for operand in operands:
            for total in here.mine(run(operand)):
                assert (total == 4).all()
        return resident_bytes()

    # XLA keeps the programs of the first pass, a megabyte or two each. A leak shows in
    # every pass; what an allocator or the segment takes once shows in one. So did
    # 2 MB, the size of one result, in two passes of three beside other work.
    passes = [all_lengths() for _ in range(6)]
    growth = min(after - before for before, after in itertools.pairwise(passes))
    assert (made() - before).tolist() == [1, 0, 1]
    # What the shared segment costs: tests/ffi/crossing_test.cc.
    # Of a leak of one operand in each run it would be 80 MB.
    assert growth < 1 << 20, passes


def test_twenty_lengths_create_nothing_and_grow_nothing(team):
    """N2."""
    team.call(twenty_lengths, at=(2, 2))


def hundred_communicators(here, mesh):
    x = here.values("int32", (6, 70_000), 0)
    total = np.broadcast_to(x.sum(0, np.int32), x.shape)

    def use(lane):
        found = here.run(mesh, lambda x: jaxcomm.psum(x, "i", lane=lane), x)
        here.identical(mesh, found, total, lane)

    jaxcomm.init(mesh, lanes="lane 0")
    use("lane 0")
    # The segment grows where a process writes for the first time. Here none writes.
    here.meet("all have used lane 0", [0, 1, 2])
    (alone,) = jaxcomm.memory_report()
    assert not alone.shared
    (mapped,) = mappings()
    assert 0 < alone.shared_bytes <= mapped
    jaxcomm.init(mesh, lanes=[f"lane {n}" for n in range(100)])
    rows = jaxcomm.memory_report()
    here.meet("all have a hundred lanes", [0, 1, 2])
    assert len(rows) == 100
    assert all(row.shared for row in rows)
    told = {row.shared_bytes for row in rows}
    assert alone.shared_bytes <= min(told), (told, alone)
    assert max(told) < alone.shared_bytes + (1 << 20), (told, alone)
    headers = sum(row.host_bytes for row in rows)
    assert headers < 100 * 8192, headers
    for n in (0, 50, 99):
        use(f"lane {n}")
    assert mappings() == [mapped], mappings()


def test_a_hundred_communicators_share_one_arena(team):
    """N3, N4."""
    team.call(hundred_communicators, at=(3, 2))


def rounds_of_finalize_and_init(here, mesh):
    x = here.values("int32", (6, 50_000), 0)
    total = np.broadcast_to(x.sum(0, np.int32), x.shape)
    run = here.program(mesh, lambda x: jaxcomm.psum(x, "i"))
    operand = here.put(mesh, x)
    files, threads, resident = [], [], []
    before = made()
    for turn in range(ROUNDS):
        if turn % 2:
            jaxcomm.init(mesh)  # otherwise lowering makes it
        else:
            jax.clear_caches()
        here.identical(mesh, here.mine(run(operand)), total, f"round {turn}")
        (member,) = jaxcomm.communicators()
        assert member.transport == "shared memory"
        files.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
        resident.append(resident_bytes())
        jaxcomm.finalize()
        assert member.closed
        assert not jaxcomm.memory_report()
    assert (made() - before).tolist() == [ROUNDS, ROUNDS, 0]
    # From the third on, when the threads that may be there are there.
    assert max(files[3:]) <= files[2], files
    assert max(threads[3:]) <= max(threads[:3]) + 1, threads
    # A round's segment has 36 MB, of which it touches some; programs some 100 kB.
    assert resident[-1] - resident[3] < 32 << 20
    assert len(mappings()) <= 1
    mine = [n for n in os.listdir("/dev/shm") if n.startswith(f"jaxcomm-{os.getpid()}")]
    assert not mine


def test_twenty_rounds_of_finalize_and_init_leave_nothing(team):
    team.call(rounds_of_finalize_and_init, at=(3, 2))


def remade_by_one(here, mesh):
    x = here.put(mesh, np.ones((3, 2), np.float32))
    run = here.program(mesh, lambda x: jaxcomm.psum(x, "i"))
    assert (here.mine(run(x)) == 3).all()
    if jax.process_index() == 0:
        jaxcomm.communicators()[0].close()
        jaxcomm.init(mesh)
    jaxcomm.finalize()
    jaxcomm.init(mesh)
    assert (here.mine(run(x)) == 3).all()
    jaxcomm.finalize()


def test_finalize_of_all_gets_processes_into_step_that_remade_one_alone(team):
    team.call(remade_by_one, at=(3, 1))
