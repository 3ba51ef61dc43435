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

ROUNDS = """
used = []
answer = True
for turn in range(12):
    jaxcomm.finalize()
    # With a lane of its own, and made by the first program too.
    if turn % 2:
        jaxcomm.init(mesh, lanes=("default", f"lane {turn}"))
    psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
    answer = answer and right() and len(jaxcomm.communicators()) == 1 + turn % 2
    used.append(resources())
answer = [answer, used]
"""


def test_rounds_of_init_and_finalize_leave_nothing(start):
    processes = start(2, devices=2)
    processes.ask(SET_UP)
    for right, used in processes.ask(ROUNDS):
        assert right
        resident, files, threads = zip(*used, strict=True)
        # A thread may not have opened its last one yet; one a round would be 9.
        assert max(files[2:]) - min(files[2:]) < 4
        # Two a round would be 16; programs may go on in one more at any time.
        assert threads[-1] - threads[3] < 8
        # A round's segment has 36 MB, of which it touches some; programs some 100 kB.
        assert resident[-1] - resident[3] < 32 << 20
    for process in processes:
        process.popen.stdin.close()
    assert [process.ends() for process in processes] == [0, 0]


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


def test_an_interrupted_start_can_be_repeated(start):
    processes = start(2)
    processes.ask(SET_UP)
    first, _ = processes
    first.tell("say_when(lambda: is_in('_gather', missing=[1]))" + INIT)
    assert first.hear() == "now"
    first.send(signal.SIGINT)
    # The timeout would be another exception.
    assert first.hear() == "interrupted"
    assert processes.ask(INIT) == ["made", "made"]
    assert processes.ask("answer = right()") == [True, True]


def test_a_start_interrupted_when_the_other_is_half_way_can_be_repeated(
    start, tmp_path
):
    go = tmp_path / "go"
    processes = start(2)
    processes.ask(SET_UP)
    first, second = processes
    # Slow to attach to the memory that process 0 has made.
    second.tell(
        f"""
attach = jaxcomm._ffi.attach_segment
def attach_late(*address):
    waiting.until(lambda: os.path.exists({str(go)!r}))
    return attach(*address)
jaxcomm._ffi.attach_segment = attach_late
say_when(lambda: is_in("attach_late"))
{INIT}"""
    )
    # And process 0 waits for its word about that.
    first.tell("say_when(lambda: is_in('collect', value=None))" + INIT)
    assert [first.hear(), second.hear()] == ["now", "now"]
    first.send(signal.SIGINT)
    assert first.hear() == "interrupted"
    go.touch()
    first.tell(INIT)
    assert [first.hear(), second.hear()] == ["made", "made"]
    outcomes = processes.ask("answer = attempt(right)")
    assert [outcome.get("value", outcome) for outcome in outcomes] == [True, True]


# The third never comes, and the test moves the clocks of those that wait for it.
MEET_BY_CLOCK = """
import types
from jaxcomm.communicator import phase, rounds
clock = waiting.Clock()
phase.time = rounds.time = types.SimpleNamespace(monotonic=clock.monotonic)

def time_out():
    waiting.until(lambda: os.path.exists({go!r}))
    clock.advance(1000)

threading.Thread(target=time_out).start()
# Process 0 sees that process 1 has come.
say_when(lambda: is_in("_exchange") if index else is_in("_gather", missing=[2]))
answer = attempt(lambda: jaxcomm.init(mesh))
"""


def test_a_process_that_dies_before_it_comes_is_named_at_the_timeout(start, tmp_path):
    processes = start(3, JAX_ENABLE_RECOVERABILITY="1")
    processes.ask(SET_UP)
    processes[2].kill()
    go = tmp_path / "go"
    both = processes[0], processes[1]
    for process in both:
        process.tell(MEET_BY_CLOCK.format(go=str(go)))
    assert [process.hear() for process in both] == ["now", "now"]
    go.touch()
    for outcome in [process.hear() for process in both]:
        assert outcome["error"] == "CommunicatorError"
        assert (
            f"waited {waiting.HANG_SECONDS:g} s for process 2 of [0, 1, 2]"
            in outcome["text"]
        )
        assert "JAXCOMM_TIMEOUT" in outcome["text"]
    rest = SET_UP.replace("mesh_of()", "mesh_of(of_processes(0, 1))")
    assert processes.ask(f"{rest}answer = right()", [0, 1]) == [True, True]


def test_processes_may_run_one_program_from_several_folders(start):
    """XLA then numbers its runs differently on each; so it does in notebooks."""
    processes = start(2, copies=True)
    processes.ask(SET_UP)
    assert processes.ask("answer = right()") == [True, True]
    # Nor does it matter that one of them has run it alone.
    processes.ask(
        f"jaxcomm.finalize(); jaxcomm.init(mesh, timeout={waiting.EXPIRES_SECONDS})"
    )
    (outcome,) = processes.ask("answer = attempt(right)", [0])
    assert "for rank 1" in outcome["text"]
    processes.ask("jaxcomm.finalize(); jaxcomm.init(mesh)")
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
