"""A second process is killed in each state of jaxcomm.shrink. The others go on."""

import itertools

import pytest

pytestmark = pytest.mark.multiprocess

# Each process holds numbers, which it adds to those of all others in two lanes.
SET_UP = """
import itertools
from jaxcomm.communicator import cache, store, survivors
from jaxcomm.communicator.backends.nccl import backend, communicators
mesh = mesh_of()
policy = jaxcomm.CommPolicy(on_failure="poison")
jaxcomm.init(mesh, lanes=("default", "other"), policy=policy)
own = jax.device_put(np.full(3, 1 + index, np.float32), jax.local_devices()[0])
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def step(mesh):
    add = lambda x: jaxcomm.psum(x, "i") + jaxcomm.psum(x, "i", lane="other")
    x = jax.make_array_from_single_device_arrays(
        (3 * mesh.size,), jax.NamedSharding(mesh, P("i")), [own])
    (number,) = {*values(jaxcomm.raise_if_failed(jitted(add, mesh)(x)))}
    return [mesh.size, number]

def go_on():
    global mesh
    while True:
        try:
            return step(mesh)
        except FAILURES:
            smaller = jaxcomm.shrink(mesh, "i")
            if smaller is mesh:
                raise
            mesh = smaller

# Each pair has a communicator, too, of which some lose a process.
for some in itertools.combinations(range(4), 2):
    if index in some:
        jaxcomm.init(mesh_of(of_processes(*some)), policy=policy)
# The pair that will be left has a program of its own, compiled before.
pair = mesh_of(of_processes(0, OTHER))
if index in (0, OTHER):
    of_pair = jitted(lambda x: jaxcomm.psum(x, "i"), pair)
    answer = values(of_pair(spread(pair)))
answer = step(mesh)
"""
# What the second process is killed in.
STATES = {
    "before it says that it lives": "survivors._agree = die",
    "while all agree": """
entries = store.Store.entries
def look(of, folder, processes):
    return (die if "survivors" in folder else entries)(of, folder, processes)
store.Store.entries = look
""",
    "once all agree": "cache.move = die",
    "while it closes": "backend.NcclBackend.end = die",
    "before the others know of its communicator": "communicators._agree_on_world = die",
    "while the others connect": "communicators._new_world = die",
    "while the others split": "communicators._ffi.create_nccl = die",
    # NCCL connects it, and does not return: the others wait for it.
    "in the first use of what all have made": """
import threading
from stand_in import StandIn
stand_in = StandIn()
stand_in.clear()
stand_in.connect("ncclSend")
def die_within():
    stand_in.until_called("ncclSend", 1)
    die()
threading.Thread(target=die_within).start()
""",
    "once it has made all": """
move = cache.move
cache.move = lambda *meshes: die(move(*meshes))
""",
}


# In the agreement, the end of the old ones, and the making of new ones.
USUAL = {
    "while all agree",
    "while it closes",
    "while the others connect",
    "in the first use of what all have made",
}


@pytest.mark.parametrize(
    ("state", "second"),
    [
        pytest.param(
            state, second, marks=[] if state in USUAL else [pytest.mark.thorough]
        )
        for state, second in zip(STATES, itertools.cycle((1, 2)), strict=False)
    ],
)
def test_a_second_death_leaves_the_others_to_go_on(state, second, start):
    processes = start(4, JAX_ENABLE_RECOVERABILITY="1")
    set_up = SET_UP.replace("OTHER", str(3 - second))
    assert processes.ask(set_up) == [[4, 20.0]] * 4
    processes[second].ask(STATES[state])
    processes[3].popen.kill()
    processes[second].tell("answer = go_on()")
    left = [0, 3 - second]
    wanted = [2, 2.0 * (1 + 4 - second)]
    assert processes.ask("answer = go_on()", left) == [wanted] * 2
    processes[second].ends()
    kept = processes.ask("answer = [values(own), values(of_pair(spread(pair)))]", left)
    assert kept == [[[1.0], [1.0]], [[4.0 - second], [1.0]]]
