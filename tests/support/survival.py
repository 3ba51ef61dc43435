"""Runs survival_job.py: processes that lose one of them and go on."""

import pathlib
import subprocess
import sys

import waiting

HERE = pathlib.Path(__file__).parent


def check(case, processes, folder, variables, size=1 << 10):
    """Run a case, print what it says; fail if a survivor did not go on as it should."""
    command = [sys.executable, "-P", "-m", "jaxcomm.launch", f"-n{processes}"]
    command += ["--elastic", "--platform", variables["JAX_PLATFORMS"]]
    command += ["--timeout", str(waiting.HANG_SECONDS)]
    job = subprocess.Popen(
        [*command, str(HERE / "survival_job.py"), case, str(folder), str(size)],
        env=variables | {"PYTHONPATH": f"{HERE}:{variables.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = waiting.ended(job)
    print(said)
    assert job.returncode == 0, said
    verdicts = [line for line in said.splitlines() if "VERDICT" in line]
    assert not [line for line in verdicts if "FAILED" in line]
    # Five of each survivor. A rank that comes too late is told, which are two, unless
    # the launcher has ended it by then.
    more = len(verdicts) - 5 * (processes - 1)
    assert more in ((0, 2) if case == "late" else (0,))
