"""C12: ten thousand calls leave nothing behind, in either of two processes."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]

SET_UP = """
mesh = mesh_of()

def call(x):
    def step(x, _):
        x = jaxcomm.ring_shift(x, "i")
        x = jaxcomm.psum(x, "i") - jaxcomm.pmax(x, "i") * 3
        return jaxcomm.all_gather(x, "i").mean(0), None

    return jax.lax.scan(step, x, length=125)[0]

chain = jitted(call, mesh)
single = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
# One is put into the meeting place, one streams through shared memory.
small, large = jax.numpy.ones_like(spread(mesh, 16)), spread(mesh, 1 << 15)

def thousand():
    chain(small), chain(small)
    for _ in range(100):
        jax.block_until_ready(single(small))
        jax.block_until_ready(single(large))

def shared():
    return jaxcomm.memory_report()[0].shared_bytes
"""

MEASURE = """
for _ in range(15):  # the allocator's arenas, one for each thread, fill
    thousand()
before, held = resources(), shared()
grown = []
for _ in range(10):
    resident = resources()[0]
    thousand()
    grown.append(resources()[0] - resident)
after = resources()
answer = [sorted(grown)[5], before[1:], after[1:], shared() - held, in_flight(),
          jaxcomm.communicators()[0].stats()["calls"]]
"""


def test_ten_thousand_calls_between_processes_leak_nothing(start):
    processes = start(2)
    processes.ask(SET_UP)
    for grown, before, after, shared, in_flight, calls in processes.ask(MEASURE):
        print(f"grew by {grown} and {shared} shared bytes; files, threads: {after}")
        # 100 bytes a call; XLA's bookkeeping breathes by a page now and then.
        assert grown < 128 << 10
        assert after[0] == before[0]
        # A program that blocks gets a thread more, once.
        assert after[1] - before[1] < 4
        # Bounded: every crossing of the table is touched once.
        assert shared < 4 << 20
        assert in_flight == 0
        assert sum(calls.values()) == 25 * 1200
