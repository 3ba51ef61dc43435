"""1,024 processes in one: how they meet, what they make, and what the plan says of it.

No data moves. Each simulated process is a thread with one device that is not there.
"""

import math
import statistics

import pytest
import simulation

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.backends.nccl import library

AXES = ("data",), ("model",)
# Who waits looks again from time to time: three times the plan's average was seen on a
# loaded machine. A message of each to each would be a hundred times as many.
SLACK = 8
# Bytes that a process reads in a round, for each doubling of processes: on average, and
# at most. A look of a leader is about 8 kB. Who reads what all wrote reads 100 kB.
BYTES_BY_LOG = 1500
BYTES_OF_A_LEADER = 30_000


def planned(mesh, **options):
    return jaxcomm.plan(dict(mesh.shape), devices_per_process=1, **options)


def run(monkeypatch, extension, mesh, lanes):
    job = simulation.Job(monkeypatch, extension)
    size = mesh.devices.size
    found = job.run(lambda: simulation.create(mesh, AXES, lanes), size)
    errors = {repr(error)[:2000] for error in found.values() if error is not None}
    assert not errors
    return job


@pytest.mark.parametrize(
    ("processes", "lanes"),
    [
        (128, ("default", "ring")),
        pytest.param(1024, ("default",), marks=pytest.mark.thorough),
    ],
)
def test_processes_meet_in_as_many_messages_as_planned(monkeypatch, processes, lanes):
    """No deadlock, one order of creation, no message of each to each."""
    mesh = simulation.Mesh(data=processes // 8, model=8)
    made = planned(mesh, lanes=lanes)
    job = run(monkeypatch, simulation.Recorder(), mesh, lanes)

    # All make the same, in one order, and it is the plan's.
    assert len(set(map(tuple, job.extension.made.values()))) == 1
    of_plan = [
        str(each.key.axes) for each in made.communicators if each.key.axes in AXES
    ]
    assert [axes for _, axes in job.extension.made[0]] == of_plan

    # No process sends a message for every other, and most send a few.
    messages = job.store.messages.values()
    assert len(messages) == processes
    start = made.startup
    rounds = 1 + len(AXES) * len(lanes)
    share = rounds / start.rounds
    assert max(messages) <= SLACK * share * start.messages.value
    assert start.messages.value / start.rounds < 4 + 4 * math.log2(processes)
    assert 3 * rounds <= statistics.mean(messages) <= SLACK * 4 * rounds
    # No process reads what all wrote.
    sent = sum(job.store.sent_bytes.values())
    planned_bytes = share * start.store_bytes.value
    assert planned_bytes / 4 <= sent <= SLACK * planned_bytes
    assert sent / processes <= rounds * BYTES_BY_LOG * math.log2(processes)
    most = max(job.store.sent_bytes.values())
    assert most <= rounds * BYTES_OF_A_LEADER * math.log2(processes)


def test_64_processes_over_the_stand_in_hold_what_was_planned(
    monkeypatch, stand_in_path
):
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    monkeypatch.setenv("JAXCOMM_FAKE_DEVICES", "64")
    library.load.cache_clear()
    assert not isinstance(library.load(), str)
    mesh = simulation.Mesh(data=8, model=8)
    extension = simulation.StandIn()
    try:
        job = run(monkeypatch, extension, mesh, ("default",))
        made = planned(mesh, policy=jaxcomm.CommPolicy(one_shot=False))
        grid = replica_groups.grid_of(mesh)
        for process in (0, 37, 63):
            members = [each for each in made.communicators if each.key.axes in AXES]
            for (key, axes), member in zip(
                job.extension.made[process], members, strict=True
            ):
                assert axes == str(member.key.axes)
                partition = replica_groups.partition(grid, member.key.axes)
                assert {len(group) for group in partition.groups} == {member.size}
                assert len(partition.groups) == sum(g.count for g in member.groups)
                # The record of a process that has done nothing yet.
                used = _ffi.flight_record_bytes(64, 1) - _ffi.flight_record_bytes(64, 0)
                held = _ffi.stats(key)["host_bytes"]
                assert held + used == member.host_bytes.value
    finally:
        for keys in extension.made.values():
            for key, _ in keys:
                _ffi.destroy(key)
        library.load.cache_clear()
