"""The records of two real processes, one of which is held up, then killed."""

import signal

import pytest
import waiting
from team import starting

from jaxcomm.diagnostics.files import merge_files

pytestmark = pytest.mark.multiprocess

# Device 1 of process 1, rank 3, waits for good before its second operation.
HELD_UP = """
def wait(i):
    if int(i) == 3:
        waiting.forever()
    return np.float32(0)

def held_up(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"))
    return jaxcomm.all_gather(x + late, "i", tiled=True)

mesh = mesh_of()
x = spread(mesh)
jax.block_until_ready(jitted(lambda x: jaxcomm.psum(x, "i"), mesh)(x))
begin(lambda: jax.block_until_ready(jitted(held_up, mesh)(x)))

def others_wait():
    (found,) = jaxcomm.flight_record().process.communicators
    return sum(entry.state == "started" for entry in found.entries) == 2 - index

waiting.until(others_wait)
answer = jaxcomm.communicators()[0].backend
"""


def test_records_name_the_rank_that_holds_up_the_others_and_the_one_that_was_killed(
    tmp_path,
):
    folder = tmp_path / "dumps"
    paths = [folder / f"flight-record-{process}.json" for process in range(2)]
    with starting(tmp_path) as start:
        # From files of their own, so that run ids of XLA's differ.
        processes = start(2, devices=2, copies=True, JAXCOMM_DUMP_DIR=str(folder))
        assert processes.ask(HELD_UP) == ["host"] * 2
        for path, process in zip(paths, processes, strict=True):
            process.popen.send_signal(signal.SIGUSR1)
            text = (
                f"flight record: {path}; compare all with python -m jaxcomm.doctor "
                f"--merge {folder}/flight-record-*.json\n"
            )
            waiting.until(lambda process=process, text=text: text in process.said())
        merged = merge_files(paths)
        processes[0].ask(
            "waited = lambda: jaxcomm.communicators()[0].stats()['waited_for']\n"
            "answer = waiting.until(lambda: waited()[1] > 0)"
        )
        processes[1].popen.kill()
        text = "process 0 of 2: a collective failed ("
        waiting.until(
            lambda: "flight record: " in processes[0].said().partition(text)[2]
        )
        of_one = merge_files(paths[:1])
    assert merged.missing == ()
    assert {record.reason for record in merged.records.values()} == {"signal"}
    (finding,) = merged.findings
    assert (finding.kind, finding.ranks) == ("behind", (3,))
    group = merged.groups[finding.group]
    rank_2, rank_3 = (f"rank {i} (process 1, cpu:{group.devices[i]})" for i in (2, 3))
    assert finding.text == (
        f"{rank_3} last completed psum(float32[1,1]) #1; ranks 0-2 wait in "
        f"all_gather(float32[1,1]) #2"
    )
    # Ranks of both processes agree on what is one operation.
    entries = [entry for own in group.entries.values() for entry in own]
    assert len({(entry.sequence, entry.site) for entry in entries}) == 2

    assert of_one.missing == (1,)
    (finding,) = of_one.findings
    assert finding.text.startswith(
        f"{rank_2} and {rank_3} left no record; rank 0 (process 0, cpu:0) and rank 1 "
        f"(process 0, cpu:1) "
    )
    assert finding.text.endswith(" in all_gather(float32[1,1]) #2")
