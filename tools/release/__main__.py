"""Run every check that a release must pass, and say how each of them ended.

Each check goes on when another fails, and writes to build/release/logs. A check that
this machine cannot run, or only in part, has a reason. It does not count as passed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

from release import environments as env

MODULE = [sys.executable, "-m"]


@dataclass(frozen=True)
class Check:
    """A command that a release must pass."""

    what: str
    command: list[str]
    needs: str = ""  # a program
    python: str = ""  # a version

    def missing(self) -> str:
        """Return what this machine lacks for it, or an empty text."""
        if self.needs and shutil.which(self.needs) is None:
            return f"no {self.needs}"
        if self.python and self.python not in env.interpreters():
            return f"no Python {self.python}"
        return ""

    def arguments(self) -> list[str]:
        """Return its command, with the interpreter that it asks for."""
        found = env.interpreters().get(self.python)
        # Ours are not its own, and make hands them on.
        ours = ["ARGS="] if self.command[0] == "make" else []
        return [*self.command, *ours, *([f"PYTHON={found}"] if found else [])]

    def environment(self) -> dict[str, str]:
        """Return its environment: tests do not find this package."""
        dropped = {"PYTHONPATH"} if self.command[0] == "make" else set()
        return {n: value for n, value in os.environ.items() if n not in dropped}


CHECKS = {
    "lint": Check("style, types, PTX, prose, locks", ["make", "lint"]),
    "wheels": Check(
        "built for manylinux, abi3, and without the extension",
        [*MODULE, "release.wheels"],
    ),
    "licences": Check("of what is compiled in", [*MODULE, "release.licences"]),
    "installed": Check(
        "wheels without a compiler, from outside the tree",
        [*MODULE, "release.fresh", "wheels"],
    ),
    "sdist": Check("built, installed, used", [*MODULE, "release.fresh", "sdist"]),
    "links": Check(
        "of the pages", [*MODULE, "pytest", "-q", "tests/docs/test_links.py"]
    ),
    "docs": Check(
        "the site, without warnings", ["make", "docs", "DOCS_NOTEBOOKS=cache"]
    ),
    "bazel": Check("build and tests", ["make", "bazel-test"], needs="bazel"),
    "sanitizers": Check("C++ tests", ["make", "sanitize"]),
    "coverage": Check("the tests on the oldest jax", ["make", "coverage"]),
    "all": Check("all tests and the soak, on the oldest jax", ["make", "test-all"]),
    "mutation": Check("200 defects, 95 % of them caught", ["make", "mutation"]),
    "newest": Check(
        "all tests and the soak, on the newest jax",
        ["make", "test-all", "VENV=.venv-3.13"],
        python="3.13",
    ),
}


def attempt(name: str, check: Check) -> tuple[str, float]:
    """Run a check; return how it ended, and the seconds it took."""
    missing = check.missing()
    if missing:
        print(f"==> {name}: not run, {missing}", flush=True)
        return f"NOT RUN: {missing}", 0.0
    log = env.WORK / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"==> {name}: {' '.join(check.arguments())}", flush=True)
    begun = time.monotonic()
    with log.open("w") as out:
        ended = subprocess.run(
            check.arguments(),
            env=check.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=env.ROOT,
        )
    seconds = time.monotonic() - begun
    printed = log.read_text(errors="replace").splitlines()
    if ended.returncode == 0:
        left = [line for line in printed if "NOT RUN" in line]
        return "; ".join(left) or "passed", seconds
    print("\n".join(printed[-30:]), flush=True)
    return f"FAILED: status {ended.returncode}, see {log}", seconds


def main() -> int:
    """Run the chosen checks; return 0 if all of them ran and passed."""
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__)
    parser.add_argument("--only", help=f"a comma-separated part of {','.join(CHECKS)}")
    parser.add_argument("--skip", default="", help="such a list, to leave out")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else list(CHECKS)
    skipped = list(filter(None, args.skip.split(",")))
    unknown = sorted({*chosen, *skipped} - set(CHECKS))
    if unknown:
        parser.error(f"no check {unknown}; there are {', '.join(CHECKS)}")
    ended = {
        name: attempt(name, CHECKS[name]) for name in chosen if name not in skipped
    }
    print()
    for name, (verdict, seconds) in ended.items():
        print(f"{name:<11} {seconds:7.0f} s  {verdict} ({CHECKS[name].what})")
    left = [name for name in CHECKS if name not in ended]
    print("not chosen: " + ", ".join(left) if left else "all checks were chosen")
    return int(any(verdict != "passed" for verdict, _ in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
