"""C15: a process that is killed is an error on the others at once, and they go on.

JAX lets them where its coordinator, in process 0, lives on and the option
``jax_enable_recoverability`` is set.
"""

import signal

import pytest

pytestmark = pytest.mark.multiprocess

MEET = """
jaxcomm.finalize()
mesh = mesh_of(of_processes(*alive))
(member,) = jaxcomm.init(mesh)
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
split = jitted(lambda x: jaxcomm.psum_start(x, "i").done(), mesh)
repeated = jitted(
    lambda x: jax.lax.fori_loop(0, 100_000, lambda _, x: jaxcomm.pmax(x, "i"), x), mesh)
small, large = spread(mesh, 3), spread(mesh, 1 << 21)
total = [float(sum(range(len(alive))))]
answer = [member.transport, values(psum(small)) == total, values(psum(large)) == total]
"""
SMALL, LARGE = (f"lambda: values(psum({name}))" for name in ("small", "large"))


def test_survivors_of_a_kill_raise_at_once_and_go_on(start):
    processes = start(6, JAX_ENABLE_RECOVERABILITY="1")
    alive = list(range(6))
    for lose, op in (
        (before_it_arrives, "psum_start(float32[1,3])"),
        (while_it_waits, "psum(float32[1,3])"),
        (with_its_operand_half_read, "psum(float32[1,2097152])"),
        (while_all_run, "pmax(float32[1,2097152])"),
        (after_it_finished, "psum(float32[1,2097152])"),
        (None, None),
    ):
        # One process alone has nobody to share memory with.
        transport = "shared memory" if len(alive) > 1 else "memory"
        told = processes.ask(f"alive = {alive}{MEET}", alive)
        assert told == [[transport, True, True]] * len(alive)
        if lose is None:
            break
        victim = processes[alive.pop()]
        gone = (
            f"rank {victim.index}, gone with process {victim.index} (pid {victim.pid})"
        )
        for outcome in lose(processes, alive, victim):
            assert outcome.get("error") in ("JaxRuntimeError", "ValueError"), outcome
            text = outcome["text"]
            assert f"{op} over axes ('i',) (lane 'default', operation " in text
            assert f"{gone}, which died." in text
            assert "Call jaxcomm.shrink(" in text
    # The last one is none the worse: its end is its own.
    processes[0].popen.stdin.close()
    assert processes[0].ends() == 0


def before_it_arrives(processes, alive, victim):
    """In the first split-phase collective of this communicator."""
    processes.ask("begin(lambda: values(split(small)))", alive)
    victim.popen.kill()
    return processes.ask("answer = outcome()", alive)


def while_it_waits(processes, alive, victim):
    """What it handed in is there to be read; only the next operation fails."""
    victim.ask(f"begin({SMALL})")
    processes[0].ask(f"begin({SMALL})")
    victim.popen.kill()
    victim.ends()
    assert all(processes.ask("answer = values(psum(small)) == total", alive[1:]))
    assert processes[0].ask("answer = outcome()['value'] == total")
    return processes.ask(f"answer = attempt({SMALL})", alive)


def with_its_operand_half_read(processes, alive, victim):
    """It has filled its slots when it stops; the others have read them when it ends."""
    victim.ask(f"begin({LARGE})")
    victim.popen.send_signal(signal.SIGSTOP)
    processes.ask(f"begin({LARGE})", alive)
    victim.popen.kill()
    return processes.ask("answer = outcome()", alive)


def while_all_run(processes, alive, victim):
    """Somewhere in a program that does nothing but large collectives."""
    processes.ask("begin(lambda: values(repeated(large)))", [*alive, victim.index])
    victim.popen.kill()
    return processes.ask("answer = outcome()", alive)


def after_it_finished(processes, alive, victim):
    ask = "answer = values(psum(large)) == total"
    assert all(processes.ask(ask, [*alive, victim.index]))
    victim.popen.kill()
    victim.ends()
    return processes.ask(f"answer = attempt({LARGE})", alive)
