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
LEFT = "called finalize or exited"
ENDINGS = {
    "sys.exit(3)": (3, LEFT),
    "class Mine(BaseException): pass\nraise Mine('of my own')": (1, LEFT),
    "os._exit(5)": (5, "died"),
    "os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, "died"),
    "signal.raise_signal(signal.SIGINT)": (-signal.SIGINT, LEFT),
}
ENDED = {"JAX_ENABLE_RECOVERABILITY": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "0"}


def test_others_that_wait_are_told_at_once_who_ended_and_how(start):
    """Without JAX's preemption service, which keeps SIGTERM from ending anything."""
    processes = start(len(ENDINGS) + 1, **ENDED)
    alive = list(range(len(ENDINGS) + 1))
    for ending, (status, left) in ENDINGS.items():
        assert all(processes.ask(f"alive = {alive}{MEET}", alive))
        leaver = processes[alive.pop()]
        processes.ask("begin(lambda: values(psum(x)))", alive)
        leaver.tell(ending)
        for outcome in processes.ask("answer = outcome()", alive):
            text = outcome["text"]
            assert "psum(float32[1,3]) over axes ('i',)" in text
            assert f"rank {leaver.index}, gone with process {leaver.index} " in text
            assert f"(pid {leaver.pid}), which {left}." in text
            # One that ended by itself is not lost: others have more steps than it.
            advice = "shrink(mesh, axis)" if left == "died" else "have had fewer steps"
            assert advice in text
            assert ("shrink" in text) == (left == "died")
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


def test_the_last_program_may_be_left_to_itself(start):
    """A process that comes to its end waits for what others still need of it."""
    processes = start(2, devices=2)
    processes.ask(
        """
import atexit
from jaxcomm.communicator import shutdown
# However long the other process is stopped.
shutdown.wait_for_work.__defaults__ = (waiting.HANG_SECONDS,)
mesh = mesh_of()
psum, x = jitted(lambda x: jaxcomm.psum(x, "i"), mesh), spread(mesh)
values(psum(x))
"""
    )
    # It says so before what jaxcomm has registered runs.
    processes[0].ask("out = psum(x); atexit.register(say, {'answer': 'ends'})")
    processes[0].popen.stdin.close()
    assert processes[0].hear() == "ends"
    assert processes[1].ask("answer = values(psum(x))") == [6.0, 6.0]
    processes[1].popen.stdin.close()
    for process in processes:
        assert process.ends() == 0, process.said()
        assert "Traceback" not in process.said()
        assert "terminate called" not in process.said()
