"""Lost processes are started again, and the others take them in, whenever they end."""

import pathlib
import re
import sys

import forked
import pytest
import team
import waiting

pytestmark = pytest.mark.multiprocess
PROGRAM = pathlib.Path(__file__).with_name("rejoin_job.py")
PROCESSES, STEPS = 3, 10


def expected():
    total = 0
    for step in range(STEPS):
        total = (3 * total + step * PROCESSES) % 65521
    return total


def run(*moments, rejoin=9):
    """Return status, last start of each process by what it printed, and all lines."""
    done = forked.run(
        [
            *(sys.executable, *forked.LAUNCH, f"-n{PROCESSES}"),
            *("--elastic", f"--rejoin={rejoin}", "--grace=2", "--no-prefix"),
            *(str(PROGRAM), *moments),
        ],
        env=team.environment(),
        capture_output=True,
        text=True,
        timeout=2 * waiting.HANG_SECONDS,
    )
    found = re.findall(r"process (\d+)-(\d+) has (\d+)", done.stdout)
    assert all(int(total) == expected() for _, _, total in found), done.stdout
    return done, {int(process): int(start) for process, start, _ in found}


@pytest.mark.parametrize(
    ("moments", "starts"),
    [
        # Who comes back ends in each state of it, and comes back once more.
        (["1-0:3", "1-1:waits", "1-2:enters", "1-3:meets", "1-4:copies",
          "1-5:agrees"], {0: 0, 1: 6, 2: 0}),
        # Others end while they take it in; the last one that knows the state does not.
        pytest.param(["1-0:3", "2-0:gathers", "2-1:6", "0-0:6/copies"],
                     {0: 1, 1: 1, 2: 2}, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_whoever_ends_while_one_is_taken_in_comes_back_too(moments, starts):
    done, found = run(*moments)
    assert done.returncode == 0, done.stderr
    assert found.keys() == {*range(PROCESSES)}, done.stdout + done.stderr
    # More where it ended with one that took it in.
    assert all(found[process] >= start for process, start in starts.items()), done


@pytest.mark.thorough
def test_if_the_last_one_that_has_the_state_ends_the_job_ends():
    done, found = run("1-0:3", "2-0:gathers", "0-0:copies")
    assert done.returncode == 128 + 9
    assert not found
    assert "process 0 was ended by SIGKILL; stopping the others" in done.stderr
