"""Runs survival_job.py: processes that lose one or two of them and go on."""

import pathlib
import subprocess
import sys

import forked
import waiting

ORDINARY = "-P", "-m", "jaxcomm.launch"
HERE = pathlib.Path(__file__).parent
# A process that does not come to make communicators is lost after this, too.
MEET_SECONDS = 5 * waiting.EXPIRES_SECONDS
# See survival_job.py.
CASES = (
    "killed", "late", "stopped", "stopped-first", "stopped-two", "stopped-in-shrink",
    "stopped-in-connect", "holds-gil", "loops", "callback", "spins", "compiles",
    "writes",
)  # fmt: skip
_OF_TWO = "stopped-two", "stopped-in-shrink", "stopped-in-connect"


def processes(case, count):
    """Return of how many a case needs to be, at least, if ``count`` is the usual."""
    return max(count, 4) if case in _OF_TWO else count


def check(case, processes, folder, variables, size=1 << 10):
    """Run a case, print what it says; fail if a survivor did not go on as it should."""
    launch = forked.LAUNCH if variables["JAX_PLATFORMS"] == "cpu" else ORDINARY
    command = [sys.executable, *launch, f"-n{processes}"]
    command += ["--elastic", "--platform", variables["JAX_PLATFORMS"]]
    command += ["--timeout", str(waiting.HANG_SECONDS)]
    own = {"PYTHONPATH": f"{HERE}:{variables.get('PYTHONPATH', '')}"}
    if "-in-" in case:
        own["JAXCOMM_TIMEOUT"] = str(MEET_SECONDS)
    job = forked.Popen(
        [*command, str(HERE / "survival_job.py"), case, str(folder), str(size)],
        env=variables | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = waiting.ended(job)
    print(said)
    assert job.returncode == 0, said
    assert ": FAILED " not in said, said
    lost = 2 if case in _OF_TWO else 1
    assert said.count(": DONE\n") == processes - lost, said
