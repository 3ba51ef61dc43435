"""A process is killed, late or hung. The others shrink their mesh and go on."""

import itertools

import pytest
import survival
from team import environment

pytestmark = pytest.mark.multiprocess


# tests/examples kills processes over the host backend, tests/nccl/test_shrink.py over
# NCCL, in a first use too.
USUAL = [
    ("host", "stopped"),
    ("nccl", "late"),
    ("nccl", "stopped-in-connect"),
]
# The host backend connects nothing.
ALL = [
    each
    for each in itertools.product(["host", "nccl"], survival.CASES)
    if each != ("host", "stopped-in-connect")
]


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(*each, marks=[] if each in USUAL else [pytest.mark.thorough])
        for each in ALL
    ],
)
def test_survivors_go_on_with_their_parameters(backend, case, tmp_path, request):
    variables = environment()
    if backend == "nccl":
        path = request.getfixturevalue("stand_in_path")
        variables |= {"JAXCOMM_NCCL_LIBRARY": path, "JAXCOMM_BACKEND": "nccl"}
    survival.check(case, survival.processes(case, 3), tmp_path, variables)


SET_UP = """
mesh = jax.make_mesh((2, 2), ("data", "context"), (jax.sharding.AxisType.Auto,) * 2)
both = ("data", "context")

def total(mesh):
    program = jax.jit(jax.shard_map(
        lambda x: jaxcomm.psum(x, both), mesh=mesh, in_specs=P(both), out_specs=P()))
    x = jax.make_array_from_callback(
        (mesh.size,), jax.NamedSharding(mesh, P(both)),
        lambda where: np.arange(mesh.size, dtype=np.float32)[where])
    return program.lower(x).compile(), x

program, x = total(mesh)
rows = mesh.devices[: 2 // mesh.devices.shape[1]]
pair = jax.sharding.Mesh(rows, both, axis_types=mesh.axis_types)
of_pair, y = total(pair) if index < 2 else (None, None)
jaxcomm.init(mesh, "data", both, lanes="other", timeout=77)
answer = values(program(x)), jaxcomm.communicators().counters.live
"""
GO_ON = """
try:
    values(program(x))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    cause = str(error)
"""
SHRINK = 'answer = attempt(lambda: shrunk.append(jaxcomm.shrink(mesh, "data")))'


def test_a_row_leaves_whole_and_what_lost_nobody_goes_on(start):
    processes = start(4, JAX_ENABLE_RECOVERABILITY="1")
    assert [a[0] for a in processes.ask(SET_UP)] == [[6.0]] * 4
    processes[3].popen.kill()
    processes.ask(f"shrunk = []\n{GO_ON}", [0, 1, 2])
    answers = processes.ask(SHRINK, [0, 1, 2])
    assert answers[:2] == [{"value": None}] * 2
    assert answers[2]["error"] == "CommunicatorError"
    assert answers[2]["text"] == (
        "process 3 lost: axis 'data' goes on without 1 of its 2 rows (1). Process 2 "
        "has devices in these rows alone. End this process"
    )
    said = processes[0].said()
    assert "1 of its 2 rows (1); process [2] leaves with them" in said
    found = processes.ask(
        """
(smaller,) = shrunk
own = [m for m in jaxcomm.communicators() if m.lane == "other"]
answer = [smaller.shape["data"], values(of_pair(y)), values(total(smaller)[0](y)),
          [[m.axes, m.size, m.timeout] for m in own]]
""",
        [0, 1],
    )
    made = [[["data"], 1, 77.0], [["data", "context"], 2, 77.0]]
    # The pair's own program was compiled before, for the same communicator.
    assert found == [[1, [1.0], [1.0], made]] * 2
