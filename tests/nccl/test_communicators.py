"""What NCCL is asked for when communicators are made, counted and closed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.primitives import nccl_rewrites

pytestmark = pytest.mark.usefixtures("stand_in")

MIB = 1 << 20
# What the stand-in takes from a device for a communicator, its own or shared.
OWN_BYTES, SHARED_BYTES = 100 * MIB, 1 * MIB
# Ours, of a rank of two: for the offsets and sizes of ragged_all_to_all.
NUMBERS_BYTES = 3 * (16 << 10)
NO_COLOR = -1
MAKES = "ncclCommInitRankConfig", "ncclCommSplit"


def colors(stand_in):
    return [call.get("peer", NO_COLOR) for call in stand_in.trace("ncclCommSplit")]


def test_running_never_creates_and_lengths_need_no_new_one(stand_in, make_mesh):
    mesh = make_mesh(i=4)
    program = over(mesh, lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (1, 0)]))
    before = jaxcomm.communicators().counters
    jax.block_until_ready(program(jnp.ones(4)))
    made = jaxcomm.communicators().counters
    assert (made.created - before.created, made.split - before.split) == (1, 1)
    (row,) = jaxcomm.memory_report()
    stand_in.clear()
    for length in range(8, 48, 8):
        jax.block_until_ready(program(jnp.ones(length)))
    (later,) = jaxcomm.memory_report()
    assert later.device_bytes == row.device_bytes
    jaxcomm.finalize()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxcomm\.init"):
        jax.block_until_ready(program(jnp.ones(4)))
    assert not stand_in.trace(*MAKES, "cuMemAlloc_v2", "ncclMemAlloc")
    # The same key names its successor.
    jaxcomm.init(mesh)
    np.testing.assert_array_equal(program(jnp.arange(4.0)), [1, 0, 0, 0])


def test_a_world_is_made_once_and_others_are_split_off_it(stand_in, make_mesh):
    before = jaxcomm.communicators().counters
    made = jaxcomm.init(make_mesh(a=2, b=3))
    assert [member.axes for member in made] == [("a",), ("b",), ("a", "b")]
    assert {member.transport for member in made} == {"NCCL 2.32.3"}
    after = jaxcomm.communicators().counters
    assert (after.created - before.created, after.split - before.split) == (1, 3)
    inits = stand_in.trace("ncclCommInitRankConfig")
    assert [call["peer"] for call in inits] == list(range(6))
    assert {call["count"] for call in inits} == {6}
    calls = stand_in.trace("ncclCommSplit")
    # Colors are groups, keys are ranks, by device.
    assert [call["peer"] for call in calls[:6]] == [0, 1, 2, 0, 1, 2]
    assert [call["op"] for call in calls[:6]] == [0, 0, 0, 1, 1, 1]
    assert [call["peer"] for call in calls[6:12]] == [0, 0, 0, 1, 1, 1]
    assert [call["op"] for call in calls[6:12]] == [0, 1, 2, 0, 1, 2]


def test_the_memory_report_tells_own_and_shared_bytes(stand_in, make_mesh, monkeypatch):
    jaxcomm.init(make_mesh(i=2), lanes=("default", "other"))
    report = shared, own = jaxcomm.memory_report()
    assert " arena " in str(report)
    assert shared.communicator.lane == "default"
    assert shared.device_bytes == 2 * SHARED_BYTES
    assert own.device_bytes == 2 * OWN_BYTES
    assert shared.parent_bytes == own.parent_bytes == 2 * OWN_BYTES
    assert shared.host_bytes > 0
    assert shared.shared_bytes == 0
    # NCCL's queue of work, of each rank.
    assert shared.pinned_bytes == own.pinned_bytes == 2 << 20
    monkeypatch.setenv("NCCL_WORK_FIFO_BYTES", "4096")
    assert jaxcomm.memory_report()[0].pinned_bytes == 2 * 4096
    # And where one looks first: the devices', and a little of the host's.
    memory = [row[7] for row in jaxcomm.communicators().rows()]
    assert [float(text.removesuffix(" MiB")) for text in memory] == [
        pytest.approx(2 * bytes_ / MIB, abs=0.2) for bytes_ in (SHARED_BYTES, OWN_BYTES)
    ]


def test_memory_for_sizes_is_made_with_the_first_program_that_has_some(
    stand_in, make_mesh, monkeypatch
):
    """Of ragged_all_to_all; or by its first call, if a communicator is a successor."""
    monkeypatch.setattr(nccl_rewrites, "_GATHERED_BYTES", -1)
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    # Each rank sends one row to each: starts, sizes, places, and sizes that come.
    numbers = [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]
    operands = jnp.arange(8.0), jnp.zeros(8), *map(jnp.array, numbers)
    program = over(
        mesh, lambda *xs: jaxcomm.ragged_all_to_all(*xs, axis_name="i"), out=jax.P("i")
    )
    made = 2 * (SHARED_BYTES + NUMBERS_BYTES)
    compiled = program.lower(*operands).compile()
    assert jaxcomm.memory_report()[0].device_bytes == made
    stand_in.clear()
    expected = [0, 4, 0, 0, 1, 5, 0, 0]
    np.testing.assert_array_equal(compiled(*operands), expected)
    assert not stand_in.trace("cuMemAlloc_v2", "cuMemAllocHost_v2")
    jaxcomm.finalize()
    jaxcomm.init(mesh, "i")
    assert jaxcomm.memory_report()[0].device_bytes == 2 * SHARED_BYTES
    np.testing.assert_array_equal(compiled(*operands), expected)
    assert jaxcomm.memory_report()[0].device_bytes == made


def test_a_plan_names_the_communicators_and_the_inboxes_of_a_run(
    with_kernels, make_mesh
):
    mesh = make_mesh(data=2, context=4)
    program = over(
        mesh,
        lambda x: jaxcomm.psum(jaxcomm.psum(x, "data"), "context"),
        jax.P("data", "context"),
        jax.P(),
    )
    x = jnp.ones((8, 16))
    policy = jaxcomm.CommPolicy(device_sizes=True)
    options = {"backend": "nccl", "policy": policy}
    made = jaxcomm.plan(mesh, program, x, machine="gpu", **options)
    without = jaxcomm.plan(mesh, program, x, machine="gpu", backend="nccl")
    arena = 64 * MIB
    jaxcomm.init(mesh, "data", **options)
    jaxcomm.init(mesh, "context", **options)
    jax.block_until_ready(program(x))
    for planned, row in zip(made.communicators, jaxcomm.memory_report(), strict=True):
        live = row.communicator
        assert (planned.axes, planned.backend) == (live.axes, live.backend)
        assert planned.shares == row.shared
        # The stand-in takes no buffers of NCCL's, but our kernels' inboxes are real,
        # and so are the arenas of ragged_all_to_all.
        assert row.device_bytes >= 8 * (_ffi.one_shot_bytes(planned.size) + arena)
    assert made.device_bytes == without.device_bytes + 2 * arena


def test_groups_of_one_get_no_communicator(stand_in, make_mesh):
    jaxcomm.init(make_mesh(i=1))
    (row,) = jaxcomm.memory_report()
    assert (row.parent_bytes, row.device_bytes, row.pinned_bytes) == (0, 0, 0)
    mesh = make_mesh(a=1, b=2)
    alone = over(mesh, lambda x: jaxcomm.psum(x, "a"), jax.P("b"), jax.P("b"))
    np.testing.assert_array_equal(alone(jnp.arange(4.0)), np.arange(4.0))
    assert not stand_in.trace(*MAKES)
    jaxcomm.init(mesh, "a")
    assert set(colors(stand_in)) <= {NO_COLOR}
    assert jaxcomm.memory_report()[-1].device_bytes == 0


# As NCCL names its settings.
SETTINGS = {
    "max_ctas": 8, "min_ctas": 2, "cga_cluster_size": 1, "traffic_class": 3,
    "comm_name": "mine", "max_p2p_peers": 5,
}  # fmt: skip
# These are no settings of NCCL's, or tested below.
OTHERS = {
    "share", "lanes", "command_buffers", "copy_engines", "one_shot", "symmetric",
    "device_sizes", "arena_bytes", "on_failure", "blocking",
}  # fmt: skip


def test_a_policy_reaches_world_and_children(stand_in, make_mesh):
    fields = {name.replace("comm_", ""): value for name, value in SETTINGS.items()}
    named = {field.name for field in dataclasses.fields(CommPolicy)}
    assert named == set(fields) | OTHERS
    jaxcomm.init(make_mesh(i=2), policy=CommPolicy(**fields))
    calls = stand_in.trace(*MAKES)
    assert len(calls) == 4
    for call in calls:
        assert SETTINGS.items() <= call["config"].items()


@pytest.mark.parametrize(
    ("share", "shared"),
    [(None, [True, False]), (True, [True, True]), (False, [False, False])],
)
def test_a_policy_decides_whether_lanes_share(stand_in, make_mesh, share, shared):
    """By default the default lane shares, and others do not."""
    policy = CommPolicy(share=share)
    jaxcomm.init(make_mesh(i=2), lanes=("default", "other"), policy=policy)
    splits = [call["config"] for call in stand_in.trace("ncclCommSplit")]
    assert [c["split_share"] for c in splits] == [int(s) for s in shared for _ in "12"]
    assert [row.shared for row in jaxcomm.memory_report()] == shared


# Without a policy the creation of a world is polled. Operations need not be: that takes
# NCCL a thread for each of them.
@pytest.mark.parametrize(
    ("blocking", "world", "child"), [(None, 0, 1), (True, 1, 1), (False, 0, 0)]
)
def test_a_policy_decides_whether_calls_block(
    stand_in, make_mesh, blocking, world, child
):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, policy=CommPolicy(blocking=blocking))
    blocks = [call["config"]["blocking"] for call in stand_in.trace(*MAKES)]
    assert blocks == [world] * 2 + [child] * 2

    def both(x):
        return jaxcomm.psum(x, "i"), jaxcomm.ppermute(x, "i", [(0, 1)])

    total, moved = over(mesh, both, out=(jax.P(), jax.P("i")))(jnp.arange(1.0, 3.0))
    np.testing.assert_array_equal(total, [3])
    np.testing.assert_array_equal(moved, [0, 1])


def test_lanes_have_a_bound_and_other_policies_are_other_worlds(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes=("a", "b"))
    assert len(stand_in.trace("ncclCommInitRankConfig")) == 2
    with pytest.raises(jaxcomm.CommunicatorError, match=r"lanes \['a', 'b'\] already"):
        jaxcomm.init(mesh, lanes="c")
    jaxcomm.init(mesh, lanes="c", policy=CommPolicy(lanes=3))
    jaxcomm.init(mesh, lanes="d", policy=CommPolicy(lanes=4, max_ctas=4))
    assert [member.lane for member in jaxcomm.communicators()] == list("abcd")
    assert len(stand_in.trace("ncclCommInitRankConfig")) == 4


def test_larger_buffers_than_the_usual_are_warned_about(make_mesh, monkeypatch):
    # Warnings are errors here.
    monkeypatch.setenv("NCCL_BUFFSIZE", str(4 * MIB))
    jaxcomm.init(make_mesh(i=2))
    for number, name in enumerate(("BUFFSIZE", "WORK_FIFO_BYTES", "WORK_FIFO_DEPTH")):
        with monkeypatch.context() as patch:
            patch.setenv(f"NCCL_{name}", str(64 * MIB))
            with pytest.warns(UserWarning, match=f"NCCL_{name}=67108864 is more than"):
                jaxcomm.init(make_mesh(i=3 + number))


def test_calls_that_graphs_replay_cannot_be_compared(stand_in, make_mesh, monkeypatch):
    monkeypatch.setattr(jaxcomm.config, "CHECK", "1")
    with pytest.raises(
        jaxcomm.CommunicatorError, match="JAXCOMM_CHECK=1 does not go with CommPolicy"
    ):
        jaxcomm.init(make_mesh(i=2), policy=CommPolicy(command_buffers=True))
    assert jaxcomm.communicators().counters.live == 0
