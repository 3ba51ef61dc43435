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
# A process on a loaded machine waits more often than the plan's average.
SLACK = 2.5


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
        # Every process reads what all wrote: a million infos a look.
        pytest.param(
            1024, ("default",), marks=[pytest.mark.slow, pytest.mark.timeout(1000)]
        ),
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

    # A few messages of each: no process sends one for every other.
    messages = job.store.messages
    assert len(messages) == processes
    of_round = made.startup.messages.value / made.startup.rounds
    rounds = 1 + len(AXES) * len(lanes)
    mean = statistics.mean(messages.values())
    assert 4 * rounds <= mean <= SLACK * rounds * of_round
    assert of_round < 4 + 2 * (math.log2(processes) + 1)
    # All of them read what all wrote: that is what the plan warns of.
    read = made.startup.store_bytes.value / made.startup.rounds * rounds
    assert read / 4 <= job.store.sent_bytes <= SLACK * read


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
