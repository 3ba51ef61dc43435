"""The first line of the launcher names the guilty process, whatever it did.

Each case is a job of four processes, see support/guilty.py. Each run of the tests draws
a fault. With ``--thorough`` there are all.
"""

import os
import pathlib
import random
import re
import sys

import forked
import guilty
import pytest
import team
import waiting

from jaxcomm.diagnostics.files import merge_files

pytestmark = pytest.mark.multiprocess
PROCESSES = 4
# Only a timeout tells of these. All meet once they have compiled, so that nothing but
# the fault lets others wait for so long.
TIMED = "sleeps", "stopped", "locked"
SECONDS = 2 * waiting.EXPIRES_SECONDS
LAST, WAIT = "pmax #13", "wait in psum #14"
# What the line says of each fault: last, others, state. The skipped step shows at the
# end, where the others have one more to take.
SAID = {
    "killed": (LAST, WAIT, "it was ended by SIGKILL; it left no record"),
    "raises": (LAST, "", "it ended with status 1"),
    "sleeps": (LAST, WAIT, "it sleeps (state S), and its CPU time stands still"),
    "stopped": (LAST, WAIT, "it is stopped (state T); it left no record"),
    "shape": (LAST, WAIT, "it came to psum(int32[8]) #14 instead"),
    "collective": (LAST, WAIT, "it came to pmin(int32[4]) #14 instead"),
    "exits": (LAST, WAIT, "it ended with status 0"),
    "skips": ("psum #18", "wait in pmax #19", "it ended with status 0"),
    "locked": (LAST, WAIT, "it sleeps (state S), and its CPU time stands still"),
    "slow": ("psum #20", "waited", "it is slow"),
}


def blames(fault, who, folder):
    seconds = SECONDS if fault in TIMED else waiting.HANG_SECONDS
    done = forked.run(
        [
            *(sys.executable, *forked.LAUNCH, f"-n{PROCESSES}", "--grace=2"),
            *(guilty.__file__, fault, str(who), str(guilty.STEPS), str(seconds)),
        ],
        env=team.environment() | {"JAXCOMM_DUMP_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert (done.returncode == 0) == (fault == "slow"), done.stderr
    first = done.stderr.partition("\n")[0]
    if fault == "killed" and who == 0:
        # JAX's store ends with it, and the others may say so before.
        ours = [x for x in done.stderr.splitlines() if x.startswith("jaxcomm.launch")]
        first = ours[0]
    last, others, state = SAID[fault]
    said = rf"process {who} \(pid \d+, host \S+\): last completed {last}"
    found = re.match(rf"jaxcomm\.launch: (suspect: {said}; .*)", first)
    assert found, f"{fault} of process {who}:\n{done.stderr}"
    assert others in first, f"{fault} of process {who}:\n{done.stderr}"
    assert state in first, f"{fault} of process {who}:\n{done.stderr}"
    if fault in ("sleeps", "locked"):
        # The stacks say where, before any traceback.
        where = done.stderr.index("guilty.py")
        assert where < done.stderr.index("Traceback"), done.stderr
        assert f"process {who} was at:" in done.stderr
    # From the files, though others may have come further before they were stopped.
    merged = merge_files(sorted(pathlib.Path(folder).glob("flight-record-*.json")))
    assert merged.skipped == []
    assert without_others(merged.suspect) == without_others(found[1])


def without_others(line):
    return re.sub("; process.*? for [^;]*", "", line)


def test_of_a_fault(tmp_path):
    draw = random.Random(os.environ.get("JAXCOMM_TEST_SEED"))
    blames(draw.choice(sorted(SAID)), draw.randrange(PROCESSES), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", SAID)
def test_of_each_fault(fault, tmp_path):
    blames(fault, random.randrange(PROCESSES), tmp_path)
