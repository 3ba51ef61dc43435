"""Starting over, being interrupted at it, and two jobs that start at once."""

import signal

import pytest
import waiting

pytestmark = pytest.mark.multiprocess

SET_UP = """
mesh = mesh_of()
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
small, large = spread(mesh, 3), spread(mesh, 1 << 20)
total = [float(sum(range(mesh.devices.size)))] * jax.local_device_count()

def right():
    return values(psum(small)) == total == values(psum(large))
"""

INIT = """
try:
    jaxcomm.init(mesh)
except KeyboardInterrupt as error:
    # Held, as a notebook holds it, with all that its frames refer to.
    held = error
    answer = "interrupted"
else:
    answer = "made"
"""


# Process 1 is slow to attach to the memory that process 0 has made.
SLOW = """
attach = jaxcomm._ffi.attach_segment
def attach_late(*address):
    waiting.until(lambda: os.path.exists({go!r}))
    return attach(*address)
jaxcomm._ffi.attach_segment = attach_late
say_when(lambda: is_in("attach_late"))
"""


@pytest.mark.parametrize("half_way", [False, True])
def test_an_interrupted_start_can_be_repeated(start, tmp_path, half_way):
    go = tmp_path / "go"
    processes = start(2)
    processes.ask(SET_UP)
    first, second = processes
    if half_way:
        second.tell(SLOW.format(go=str(go)) + INIT)
    # Process 0 waits for the other to come, or to say that it has the memory.
    at = "'collect', value=None" if half_way else "'_enter', outcome=None"
    first.tell(f"say_when(lambda: is_in({at})){INIT}")
    assert first.hear() == "now"
    if half_way:
        assert second.hear() == "now"
    first.popen.send_signal(signal.SIGINT)
    # The timeout would be another exception.
    assert first.hear() == "interrupted"
    go.touch()
    if not half_way:
        second.tell(INIT)
    first.tell(INIT)
    assert [first.hear(), second.hear()] == ["made", "made"]
    outcomes = processes.ask("answer = attempt(right)")
    assert [outcome.get("value", outcome) for outcome in outcomes] == [True, True]


def test_processes_may_run_one_program_from_several_folders(start):
    """XLA then numbers its runs differently on each; so it does in notebooks."""
    processes = start(2, copies=True)
    processes.ask(SET_UP)
    assert processes.ask("answer = right()") == [True, True]
    # Nor does it matter that one of them has run it alone.
    again = "jaxcomm.finalize(); jaxcomm.init(mesh, timeout={})"
    processes.ask(again.format(waiting.EXPIRES_SECONDS))
    (outcome,) = processes.ask("answer = attempt(right)", [0])
    assert "for rank 1" in outcome["text"]
    processes.ask(again.format(waiting.HANG_SECONDS))
    assert processes.ask("answer = right()") == [True, True]


def test_two_jobs_at_once_do_not_meet(start):
    """Same program, same axes, same devices, but numbers of their own."""
    jobs = [start(2), start(2)]
    for number, job in enumerate(jobs):
        for process in job:
            process.tell(f"job = {number}{SET_UP}{JOB}")
    for job in jobs:
        assert [process.hear() for process in job] == [True, True]


JOB = """
program = jitted(
    lambda x: jaxcomm.all_gather(x, "i", tiled=True).reshape(2, -1)[:, :1]
    + jaxcomm.ring_shift(x, "i"), mesh)
answer = True
for turn in range(50):
    shift = 1000 * job + turn
    x = (small, large)[turn % 2] + shift
    gathered, sent = [shift, shift + 1], shift + 1 - index
    (shard,) = program(x).addressable_shards
    expected = np.add(gathered, sent)[:, None].astype(np.float32)
    answer = answer and bool((np.asarray(shard.data) == expected).all())
"""
