"""1,024 processes in one: how they meet, what they make, and what the plan says of it.

No data moves. Each simulated process is a thread with one device that is not there.
"""

import math
import statistics

import pytest
import simulation

import jaxcomm

AXES = ("data",), ("model",)
# Who waits looks again from time to time: three times the plan's average was seen on a
# loaded machine. A message of each to each would be a hundred times as many.
SLACK = 8
# Bytes that a process reads in a round, for each doubling of processes: on average, and
# at most. A look of a leader is about 8 kB. Who reads what all wrote reads 100 kB.
BYTES_BY_LOG = 1500
BYTES_OF_A_LEADER = 30_000


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
    made = jaxcomm.plan(dict(mesh.shape), devices_per_process=1, lanes=lanes)
    job = simulation.Job(monkeypatch, simulation.Recorder())
    found = job.run(lambda: simulation.create(mesh, AXES, lanes), processes)
    assert not {repr(error)[:2000] for error in found.values() if error is not None}

    # All make the same, in one order, and it is the plan's.
    assert len(set(map(tuple, job.extension.made.values()))) == 1
    of_plan = [each.key.axes for each in made.communicators if each.key.axes in AXES]
    assert [axes for _, axes in job.extension.made[0]] == list(map(str, of_plan))

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
