"""A loop of several processes. One of them goes wrong in its seventh step.

Usage: python -m jaxcomm.launch -n 4 guilty.py [FAULT PROCESS [STEPS [SECONDS]]]

A collective may take SECONDS, else ``JAXCOMM_TIMEOUT``. Under ``--elastic`` the others
go on. Its state is a whole number that tells which steps ran on how many processes:
:func:`expected` computes it without a collective.
"""

import os
import signal
import sys
import threading

import jax
import numpy as np
import waiting

import jaxcomm
from jaxcomm import compat

STEPS, BAD = 10, 7
# Of a wait for one that does not come to agree.
SHRINK_SECONDS = 3 * waiting.EXPIRES_SECONDS
IS_ELASTIC = os.environ.get("JAXCOMM_ELASTIC") == "1"
_MOST = 65521
FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: {}["no such key"],
    "sleeps": lambda: threading.Event().wait(),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "shape": lambda: None,  # of another collective, see below
    "collective": lambda: None,
    "exits": lambda: sys.exit(0),
    "skips": lambda: None,
    "locked": lambda: [lock.acquire() for lock in [threading.Lock()] * 2],
    "slow": lambda: waiting.dawdle(waiting.EXPIRES_SECONDS),
}


def advanced(state: int, step: int, total: int) -> int:
    return (3 * state + step * total) % _MOST


def expected(points: list[tuple[int, int]], steps: int) -> int:
    """Returns the last state of a run with so many processes from some steps on."""
    state = 0
    for step in range(1, steps + 1):
        count = [count for since, count in points if since < step][-1]
        state = advanced(state, step, count * (count + 1) // 2)
    return state


def meet(name):
    """Returns once all are here; of an elastic job some may have gone."""
    if not IS_ELASTIC:
        milliseconds = int(1000 * waiting.HANG_SECONDS)
        compat.key_value_store().wait_at_barrier(name, milliseconds)


def meet_in_a_collective(name):
    """Meets once a collective of this process waits."""
    waiting.until(lambda: any(m.stats()["in_flight"] for m in jaxcomm.communicators()))
    meet(name)


class Loop:
    """The loop, on a mesh that may lose processes."""

    def __init__(self, fault, guilty, steps, seconds=None):
        self.fault, self.steps, self.seconds = fault, steps, seconds
        self.is_guilty = jax.process_index() == guilty
        self.step, self.state, self.before = 0, 0, 0
        auto = jax.sharding.AxisType.Auto
        self.mesh = jax.make_mesh((jax.device_count(),), ("i",), (auto,))
        self.points = [(0, self.mesh.size)]

    def compile(self):
        """Compiles everything: a wait is then for a process, not for XLA."""
        mesh = self.mesh
        is_cpu = jax.default_backend() == "cpu"
        if self.seconds or not is_cpu or os.environ.get("JAXCOMM_BACKEND"):
            policy = jaxcomm.CommPolicy(on_failure="poison") if IS_ELASTIC else None
            jaxcomm.init(mesh, policy=policy, timeout=self.seconds)
        sharding = jax.NamedSharding(mesh, jax.P("i"))

        def compiled(collective, count):
            def put(value):
                def part(index):
                    return np.full(count, value, np.int32)

                return jax.make_array_from_callback(
                    (count * mesh.size,), sharding, part
                )

            program = jax.jit(
                jax.shard_map(
                    lambda x: collective(x, "i"), mesh=mesh, in_specs=jax.P("i"),
                    out_specs=jax.P("i"), check_vma=False,
                )
            )  # fmt: skip
            ready = program.lower(put(0)).compile()

            def run(value):
                return int(
                    jaxcomm.raise_if_failed(ready(put(value))).addressable_data(0)[0]
                )

            return run

        self.pmin = compiled(jaxcomm.pmin, 1)
        self.pmax = compiled(jaxcomm.pmax, 4)
        self.psum = compiled(jaxcomm.psum, 4)
        self.others = {
            "shape": compiled(jaxcomm.psum, 8),
            "collective": compiled(jaxcomm.pmin, 4),
        }
        # Nobody waits in a collective for one that still compiles.
        meet("compiled")

    def advance(self):
        """Takes one step, and is guilty once."""
        place = 1 + [d.process_index for d in self.mesh.devices.flat].index(
            jax.process_index()
        )
        step = self.step + 1
        is_bad = self.is_guilty and step == BAD
        self.is_guilty &= not is_bad
        if is_bad:
            print(f"FAULT {waiting.time_of_day()}", flush=True)
            if self.fault == "skips":
                self.step += 1
                return
        self.pmax(step)
        if is_bad:
            meet("the others wait")
            FAULTS[self.fault]()
        elif step == BAD and self.fault not in ("", "skips") and not IS_ELASTIC:
            threading.Thread(
                target=meet_in_a_collective, args=["the others wait"], daemon=True
            ).start()
        psum = self.others.get(self.fault, self.psum) if is_bad else self.psum
        self.before, self.state = self.state, advanced(self.state, step, psum(place))
        self.step = step

    def agree(self):
        """Goes back to the last step that all have taken."""
        step = self.pmin(self.step)
        if step < self.step:
            self.step, self.state = step, self.before
        self.points = [each for each in self.points if each[0] < step]
        self.points.append((step, self.mesh.size))

    def run(self):
        errors = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError
        is_compiled = must_agree = False
        while self.step < self.steps:
            try:
                if not is_compiled:
                    self.compile()
                is_compiled = True
                if must_agree:
                    self.agree()
                self.advance()
                if must_agree:
                    print(f"WENT ON {waiting.time_of_day()}", flush=True)
                must_agree = False
            except errors:
                if not IS_ELASTIC:
                    raise
                self.mesh = jaxcomm.shrink(self.mesh, "i", timeout=SHRINK_SECONDS)
                is_compiled, must_agree = False, True
        print(f"STATE {self.state} {self.points}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    Loop(
        given[0] if given else "",
        int(given[1]) if given else -1,
        int(given[2]) if given[2:] else STEPS,
        float(given[3]) if given[3:] else None,
    ).run()
