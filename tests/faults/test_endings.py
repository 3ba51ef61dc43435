"""C3: a process may end as it likes; the others are told, and nothing stays behind."""

import signal

import pytest

pytestmark = pytest.mark.multiprocess

MEET = """
jaxcomm.finalize()
mesh = mesh_of(of_processes(*alive))
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 3)
answer = values(psum(x)) == [float(sum(range(len(alive))))]
"""

# How a process ends, its status, and how it left in the words of the others. Where
# Python still runs, the others hear of it from the process itself.
ENDINGS = {
    "sys.exit(3)": (3, "called finalize or exited"),
    "class Mine(BaseException): pass\nraise Mine('of my own')": (
        1,
        "called finalize or exited",
    ),
    "os._exit(5)": (5, "died"),
    "os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, "died"),
    "signal.raise_signal(signal.SIGINT)": (
        -signal.SIGINT,
        "called finalize or exited",
    ),
}


def test_others_that_wait_are_told_at_once_who_ended_and_how(start):
    """Without JAX's preemption service, which keeps SIGTERM from ending anything."""
    processes = start(
        len(ENDINGS) + 1,
        JAX_ENABLE_RECOVERABILITY="1",
        JAX_ENABLE_PREEMPTION_SERVICE="0",
    )
    alive = list(range(len(ENDINGS) + 1))
    for ending, (status, left) in ENDINGS.items():
        assert all(processes.ask(f"alive = {alive}{MEET}", alive))
        leaver = processes[alive.pop()]
        processes.ask("begin(lambda: values(psum(x)))", alive)
        leaver.tell(ending)
        outcomes = processes.ask("answer = outcome()", alive)
        for outcome in outcomes:
            text = outcome["text"]
            assert "psum(float32[1,3]) over axes ('i',)" in text
            assert f"rank {leaver.index}, gone with process {leaver.index} " in text
            assert f"(pid {leaver.pid}), which {left}." in text
        assert leaver.ends() == status, leaver.said()
    assert "Mine: of my own" in processes[4].said()
    assert "KeyboardInterrupt" in processes[1].said()
    processes[0].popen.stdin.close()
    assert processes[0].ends() == 0


def test_an_exception_in_one_process_ends_both_with_their_own_status(start):
    """As users meet it: nothing catches, nothing finalizes, and JAX as it comes."""
    processes = start(2)
    processes.ask("mesh = mesh_of(); answer = psum_of_ones(mesh)")
    # BaseException: the worker answers any other.
    processes[0].tell(
        "try: psum_of_ones(mesh, 3)\n"
        "except Exception as error: raise BaseException(str(error))"
    )
    processes[1].tell("raise BaseException('of my own')")
    assert [process.ends() for process in processes] == [1, 1]
    assert "gone with process 1" in processes[0].said()
    assert "BaseException: of my own" in processes[1].said()


def test_processes_that_just_end_have_status_0(start):
    processes = start(2)
    assert processes.ask(f"alive = [0, 1]{MEET}") == [True, True]
    processes.ask("begun = [psum(x) for _ in range(500)]")
    for process in processes:
        process.popen.stdin.close()
    for process in processes:
        assert process.ends() == 0, process.said()
        assert "Traceback" not in process.said()
        assert "terminate called" not in process.said()


def test_signals_end_a_process_that_waits_in_a_collective(start):
    processes = start(
        3, JAX_ENABLE_RECOVERABILITY="1", JAX_ENABLE_PREEMPTION_SERVICE="0"
    )
    waits = "say_when(in_flight); values(psum(x))"

    assert all(processes.ask(f"alive = [0, 1, 2]{MEET}"))
    processes[2].tell(waits)
    assert processes[2].hear() == "now"
    processes[2].send(signal.SIGTERM)
    assert processes[2].ends() == -signal.SIGTERM

    assert all(processes.ask(f"alive = [0, 1]{MEET}", [0, 1]))
    processes[1].tell(waits)
    assert processes[1].hear() == "now"
    processes[1].send(signal.SIGINT)
    # Python hears of it when JAX comes back from the wait.
    processes[0].ask("answer = values(psum(x))")
    assert processes[1].ends() == -signal.SIGINT
    assert "KeyboardInterrupt" in processes[1].said()
