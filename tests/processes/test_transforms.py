"""Loops and branches across processes, and XLA's own collectives beside ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def control_flow(here, mesh):
    x = here.values("int32", (6, 5), 0) % 100
    steps = 50

    def program(x):
        def step(carry, k):
            carry = (jaxcomm.psum(carry, "i") + k * jaxcomm.ring_shift(carry, "i")) % 97
            return carry, jax.lax.pmax(carry, "i")

        def turn(state):
            k, total = state
            return k + 1, (total + jaxcomm.all_gather(total, "i").sum(0)) % 89

        looped = jax.lax.scan(step, x, jnp.arange(steps))
        counted = jax.lax.while_loop(lambda state: state[0] < 7, turn, (0, x))[1]
        chosen = jax.lax.cond(
            jaxcomm.psum(x, "i")[0] > 0,
            lambda x: jaxcomm.pscan(x, "i"),
            lambda x: jaxcomm.pbroadcast(x, "i", 3),
            x,
        )
        return *looped, counted, chosen

    found = here.run(mesh, program, x)
    carry, tops = x, []
    for k in range(steps):
        carry = (carry.sum(0) + k * np.roll(carry, 1, 0)) % 97
        tops.append(np.broadcast_to(carry.max(0), carry.shape))
    counted = x
    for _ in range(7):
        counted = (counted + counted.sum(0)) % 89
    chosen = x.cumsum(0) if x.sum(0)[0] > 0 else np.broadcast_to(x[3], x.shape)
    expected = [carry, np.stack(tops, 1), counted, chosen]
    here.identical(mesh, found, [x.astype(np.int32) for x in expected])


def test_loops_and_branches_go_the_same_way_on_every_process(team):
    team.call(control_flow, at=(3, 2))
