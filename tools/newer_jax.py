"""Run one test of each file with a JAX newer than the installed; part of ``.ci/run``.

That is a pre-release, or a release that [tool.jaxcomm] of pyproject.toml does not
include, if pip offers one. If tests fail, the last line is a warning, and the run still
passes: mend compat/ before users have that JAX.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
# First in PYTHONPATH: the newer JAX and a copy of jaxcomm. No environment changes.
FOLDER = ROOT / "build" / "newer-jax"
LOG = FOLDER.with_suffix(".log")
# The tests take half of it on two cores.
LEAST_SECONDS = 100
ABOUT = """
import importlib.metadata, jaxcomm
print(importlib.metadata.version("jax"), *jaxcomm.__path__)
"""


def newer(installed: str, report: str) -> str | None:
    """Return the version that pip would install, if it is newer than the installed one.

    Args:
      installed: a version.
      report: as ``pip install --report`` writes it.
    """
    offered = json.loads(report)["install"][0]["metadata"]["version"]
    return offered if Version(offered) > Version(installed) else None


def verdict(environment: Path, seconds: float, run) -> str | None:
    """Test with the newest JAX there is, and return a sentence; None if it is no newer.

    Args:
      environment: the virtual environment of the run that binds.
      seconds: how long all of it may take.
      run: runs a command, as :func:`run` does.
    """
    end = time.monotonic() + seconds
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    ask = ["--dry-run", "--pre", "--no-deps", "--ignore-installed", "--report", "-"]
    here = run([python, "-P", "-c", ABOUT], seconds)
    offer = run([*pip, *ask, "jax"], seconds)
    if here.returncode or offer.returncode:
        return None  # Without a package index there is nothing newer.
    installed, package = here.stdout.strip().split(maxsplit=1)
    version = newer(installed, offer.stdout)
    if version is None:
        return None
    if end - time.monotonic() < LEAST_SECONDS:
        return f"warning: no time is left for jax {version}"
    shutil.rmtree(FOLDER, ignore_errors=True)
    made = run([*pip, "--target", FOLDER, f"jax=={version}"], end - time.monotonic())
    if made.returncode:
        return f"warning: pip fails to install jax {version}: {made.stderr}"
    shutil.copytree(package, FOLDER / "jaxcomm")
    tests = ["make", "smoke-tests", f"PYTHON={python}", f"VENV={environment}"]
    done = run(tests, end - time.monotonic(), PYTHONPATH=FOLDER)
    LOG.write_text(done.stdout + done.stderr)
    if done.returncode:
        return f"warning: a test of {LOG.relative_to(ROOT)} fails with jax {version}"
    return f"One test of each file passes with jax {version} too."


def run(command, seconds: float, **variables) -> subprocess.CompletedProcess[str]:
    """Run a command and what it starts, for some seconds at most."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = ""
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        late = f"\nIt was not done in {seconds:.0f} s."
    return subprocess.CompletedProcess(command, process.returncode, out, error + late)


if __name__ == "__main__":
    sentence = verdict(Path(sys.argv[1]).resolve(), float(sys.argv[2]), run)
    if sentence:
        print(sentence)
