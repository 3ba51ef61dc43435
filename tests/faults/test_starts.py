"""Starting over, being interrupted at it, and two jobs that start at once."""

import signal
import time

import pytest

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
for turn in range(20):
    jaxcomm.finalize()
    # With a lane of its own, and made by the first program too.
    if turn % 2:
        jaxcomm.init(mesh, lanes=("default", f"lane {turn}"))
    psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
    answer = answer and right() and len(jaxcomm.communicators()) == 1 + turn % 2
    used.append(resources())
answer = [answer, used]
"""


def test_twenty_rounds_of_init_and_finalize_leave_nothing(start):
    processes = start(2, devices=2)
    processes.ask(SET_UP)
    for right, used in processes.ask(ROUNDS):
        assert right
        print(used)
        resident, files, threads = zip(*used, strict=True)
        # A thread may not have opened its last one yet; one a round would be 17.
        assert max(files[2:]) - min(files[2:]) < 4
        # Two a round would be 30; programs may go on in one more at any time.
        assert threads[-1] - threads[4] < 8
        # A round's segment has 36 MB, of which it touches some; programs some 100 kB.
        assert resident[-1] - resident[4] < 32 << 20
    for process in processes:
        process.popen.stdin.close()
    assert [process.ends(30) for process in processes] == [0, 0]


INIT = """
try:
    jaxcomm.init(mesh)
except KeyboardInterrupt as error:
    # Held, as a notebook holds it, with all that its frames refer to.
    held = error
    answer = [time.monotonic(), "interrupted"]
else:
    answer = [time.monotonic(), "made"]
"""


def test_an_interrupted_start_can_be_repeated(start):
    processes = start(2, timeout=20)
    processes.ask(SET_UP)
    first, _ = processes
    first.tell("say_when(lambda: is_in('_gather', missing=[1]))" + INIT)
    assert first.hear() == "now"
    since = time.monotonic()
    first.send(signal.SIGINT)
    end, how = first.hear()
    assert how == "interrupted"
    print(f"KeyboardInterrupt after {end - since:.2f} s")
    assert end - since < 15
    assert [how for _, how in processes.ask(INIT)] == ["made", "made"]
    assert processes.ask("answer = right()") == [True, True]


def test_a_start_interrupted_when_the_other_is_half_way_can_be_repeated(
    start, tmp_path
):
    go = tmp_path / "go"
    processes = start(2, timeout=20)
    processes.ask(SET_UP)
    first, second = processes
    # Slow to attach to the memory that process 0 has made.
    second.tell(
        f"""
attach = jaxcomm._ffi.attach_segment
def attach_late(*address):
    while not os.path.exists({str(go)!r}):
        time.sleep(0.001)
    return attach(*address)
jaxcomm._ffi.attach_segment = attach_late
say_when(lambda: is_in("attach_late"))
{INIT}"""
    )
    # And process 0 waits for its word about that.
    first.tell("say_when(lambda: is_in('collect', value=None))" + INIT)
    assert [first.hear(), second.hear()] == ["now", "now"]
    first.send(signal.SIGINT)
    assert first.hear()[1] == "interrupted"
    go.touch()
    first.tell(INIT)
    assert [first.hear()[1], second.hear()[1]] == ["made", "made"]
    outcomes = processes.ask("answer = attempt(right)")
    assert [outcome.get("value", outcome) for outcome in outcomes] == [True, True]


def test_a_process_that_dies_before_it_comes_is_named_at_the_deadline(start):
    processes = start(3, timeout=100, JAX_ENABLE_RECOVERABILITY="1")
    processes.ask(SET_UP)
    processes[2].kill()
    # By then the other one has come.
    for outcome in processes.ask(
        "os.environ['JAXCOMM_TIMEOUT'] = '5'\n"
        "answer = attempt(lambda: jaxcomm.init(mesh))\n"
        "os.environ['JAXCOMM_TIMEOUT'] = '100'",
        [0, 1],
    ):
        assert outcome["error"] == "CommunicatorError"
        assert "waited 5 s for process 2 of [0, 1, 2]" in outcome["text"]
        assert "JAXCOMM_TIMEOUT" in outcome["text"]
        assert outcome["end"] - outcome["begin"] < 60
    rest = SET_UP.replace("mesh_of()", "mesh_of(of_processes(0, 1))")
    assert processes.ask(f"{rest}answer = right()", [0, 1]) == [True, True]


def test_processes_may_run_one_program_from_several_folders(start):
    """XLA then numbers its runs differently on each; so it does in notebooks."""
    processes = start(2, timeout=100, copies=True)
    processes.ask(SET_UP)
    assert processes.ask("answer = right()") == [True, True]
    # Nor does it matter that one of them has run it alone.
    processes.ask("jaxcomm.finalize(); jaxcomm.init(mesh, timeout=2)")
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
for turn in range(150):
    shift = 1000 * job + turn
    x = (small, large)[turn % 2] + shift
    gathered, sent = [shift, shift + 1], shift + 1 - index
    (shard,) = program(x).addressable_shards
    expected = np.add(gathered, sent)[:, None].astype(np.float32)
    answer = answer and bool((np.asarray(shard.data) == expected).all())
"""
