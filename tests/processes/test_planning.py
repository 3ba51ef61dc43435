"""Over several processes a plan counts, and measures, what a run does."""

import jax
import pytest

import jaxcomm
from jaxcomm.doctor import in_turns

pytestmark = pytest.mark.multiprocess


def planned_and_checked(here):
    mesh = here.mesh(2, 1)
    if mesh is None:
        return None
    spec = jax.P("i")
    program = jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.psum(x, "i") + jaxcomm.ring_shift(x, "i"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    x = here.put(mesh, here.values("float32", (2, 3), 0))
    made = jaxcomm.plan(mesh, program, x)
    for _ in range(3):
        jax.block_until_ready(program(x))
    rows = made.check(in_turns.records(mesh))
    (member,) = made.communicators
    (row,) = jaxcomm.memory_report()
    return {
        "processes": made.processes,
        "carriers": sorted({each.planned.cost.carrier for each in rows}),
        "transport": row.communicator.transport,
        "counts": [each.count for each in rows],
        "seen": [[each.seen, each.size] for each in rows],
        "alone": [[each.seen, each.size] for each in made.check()],
        "fits": row.shared_bytes <= member.host_bytes.value,
        "measured": all(each.measured > 0 for each in rows),
    }


def test_a_plan_of_two_processes_is_checked_by_the_records_of_both(team):
    expected = {
        "processes": 2,
        "carriers": ["shared memory"],
        "transport": "shared memory",
        "counts": [3, 3],
        "seen": [[2, 2], [2, 2]],
        "alone": [[1, 2], [1, 2]],
        "fits": True,
        "measured": True,
    }
    assert team.call(planned_and_checked) == [expected] * 2 + [None] * 2
