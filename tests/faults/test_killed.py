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
repeated = jitted(
    lambda x: jax.lax.fori_loop(0, 100_000, lambda _, x: jaxcomm.pmax(x, "i"), x), mesh)
small, large = spread(mesh, 3), spread(mesh, 1 << 21)
total = [float(sum(range(len(alive))))]
answer = [member.transport, values(psum(small)) == total, values(psum(large)) == total]
"""


class Stages:
    """A set of processes that loses one after the other."""

    def __init__(self, processes, count):
        self.processes = processes
        self.alive = list(range(count))

    def meet(self):
        """Has those that live make a mesh of their own and compute with it."""
        # One process alone has nobody to share memory with.
        transport = "shared memory" if len(self.alive) > 1 else "memory"
        told = self.ask(f"alive = {self.alive}{MEET}")
        assert told == [[transport, True, True]] * len(self.alive)

    def ask(self, code):
        return self.processes.ask(code, self.alive)

    def loses(self):
        """Returns the last of those that live, who is not to be among them any more."""
        return self.processes[self.alive.pop()]

    def check(self, victim, outcomes, op):
        """Checks what the others say about the one that died."""
        gone = (
            f"rank {victim.index}, gone with process {victim.index} (pid {victim.pid})"
        )
        for outcome in outcomes:
            assert outcome.get("error") in ("JaxRuntimeError", "ValueError"), outcome
            text = outcome["text"]
            assert f"{op} over axes ('i',) (lane 'default', operation " in text
            assert f"{gone}, which died." in text
            assert "Call jaxcomm.finalize()" in text


def test_survivors_of_a_kill_raise_at_once_and_go_on(start):
    processes = start(6, JAX_ENABLE_RECOVERABILITY="1")
    stages = Stages(processes, 6)
    for lose in (
        before_it_arrives,
        while_it_waits,
        with_its_operand_half_read,
        while_all_run,
        after_it_finished,
    ):
        stages.meet()
        lose(stages)
    stages.meet()
    # The last one is none the worse: its end is its own.
    processes[0].popen.stdin.close()
    assert processes[0].ends() == 0


def before_it_arrives(stages):
    victim = stages.loses()
    stages.ask("begin(lambda: values(psum(small)))")
    victim.kill()
    stages.check(victim, stages.ask("answer = outcome()"), "psum(float32[1,3])")


def while_it_waits(stages):
    """What it handed in is there to be read; only the next operation fails."""
    victim = stages.loses()
    victim.ask("begin(lambda: values(psum(small)))")
    first = stages.processes[0]
    first.ask("begin(lambda: values(psum(small)))")
    victim.kill()
    victim.ends()
    others = stages.alive[1:]
    told = stages.processes.ask("answer = [values(psum(small)), total]", others)
    assert all(found == total for found, total in told)
    assert first.ask("answer = outcome()")["value"] == told[0][1]
    outcomes = stages.ask("answer = attempt(lambda: values(psum(small)))")
    stages.check(victim, outcomes, "psum(float32[1,3])")


def with_its_operand_half_read(stages):
    """It has filled its slots when it stops; the others have read them when it ends."""
    victim = stages.loses()
    victim.ask("begin(lambda: values(psum(large)))")
    victim.send(signal.SIGSTOP)
    stages.ask("begin(lambda: values(psum(large)))")
    victim.kill()
    outcomes = stages.ask("answer = outcome()")
    stages.check(victim, outcomes, "psum(float32[1,2097152])")


def while_all_run(stages):
    """Somewhere in a program that does nothing but large collectives."""
    victim = stages.loses()
    for process in (victim, *(stages.processes[i] for i in stages.alive)):
        process.tell("begin(lambda: values(repeated(large)))")
    for process in (victim, *(stages.processes[i] for i in stages.alive)):
        process.hear()
    victim.kill()
    outcomes = stages.ask("answer = outcome()")
    stages.check(victim, outcomes, "pmax(float32[1,2097152])")


def after_it_finished(stages):
    victim = stages.loses()
    everyone = [*stages.alive, victim.index]
    told = stages.processes.ask("answer = values(psum(large)) == total", everyone)
    assert all(told)
    victim.kill()
    victim.ends()
    outcomes = stages.ask("answer = attempt(lambda: values(psum(large)))")
    op = "psum(float32[1,2097152])"
    stages.check(victim, outcomes, op)
