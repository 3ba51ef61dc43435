"""Over several processes a plan counts, and measures, what a run does."""

import jax
import pytest
from models import over

import jaxcomm
from jaxcomm.doctor import in_turns

pytestmark = pytest.mark.multiprocess


def planned_and_checked(here, mesh):
    program = over(mesh, lambda x: jaxcomm.psum(x, "i") + jaxcomm.ring_shift(x, "i"))
    x = here.put(mesh, here.values("float32", (2, 3), 0))
    made = jaxcomm.plan(mesh, program, x)
    for _ in range(3):
        jax.block_until_ready(program(x))
    rows = made.check(in_turns.records(mesh))
    (member,) = made.communicators
    (row,) = jaxcomm.memory_report()
    assert made.processes == 2
    assert {each.planned.transport for each in rows} == {"shared memory"}
    assert row.communicator.transport == "shared memory"
    assert [(each.count, each.seen, each.size) for each in rows] == [(3, 2, 2)] * 2
    assert [(each.seen, each.size) for each in made.check()] == [(1, 2)] * 2
    assert 0 < row.shared_bytes <= member.shared_bytes
    assert all(each.measured > 0 for each in rows)


def test_a_plan_of_two_processes_is_checked_by_the_records_of_both(team):
    team.call(planned_and_checked, at=(2, 1))
