"""The checks that a release must pass, cheap ones first.

None does what another one has done. `make mutation` is none of them: it takes hours,
and examines the tests, not the release.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from release import environments as env
from release import kept

MODULE = [sys.executable, "-m"]


@dataclass(frozen=True)
class Check:
    """A command that a release must pass."""

    what: str
    command: list[str]
    needs: str = ""  # a program
    python: str = ""  # a version
    makes: str = ""  # a pattern of files for other checks
    uses: str = ""  # what another check makes

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
        bare = self.command[0] == "make" and not self.command[-1].startswith("ARGS=")
        return [*self.command, *(["ARGS="] if bare else []),
                *([f"PYTHON={found}"] if found else [])]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return its environment: tests do not find this package."""
        dropped = {"PYTHONPATH"} if self.command[0] == "make" else set()
        return {n: value for n, value in os.environ.items() if n not in dropped}

    def inputs(self, tree: str) -> list[str]:
        """Return all that its outcome depends on: files, its command, the Pythons."""
        versions = [
            subprocess.check_output([path, "-VV"], text=True)
            for path in env.interpreters().values()
        ]
        return [tree, kept.files(self.uses), *map(str, self.arguments()), *versions]


CHECKS = {
    "lint": Check("style, types, PTX, prose, locks", ["make", "lint"]),
    "wheels": Check(
        "for manylinux, abi3, and without the extension",
        [*MODULE, "release.wheels"],
        makes="dist/*.whl",
    ),
    "licences": Check(
        "of what is compiled in", [*MODULE, "release.licences"], uses="dist/*.whl"
    ),
    "installed": Check(
        "wheels without a compiler, from outside the tree",
        [*MODULE, "release.fresh", "wheels"],
        uses="dist/*.whl",
    ),
    "sdist": Check(
        "built, installed, used",
        [*MODULE, "release.fresh", "sdist"],
        makes="dist/*.tar.gz",
    ),
    "bazel": Check("build and tests", ["make", "bazel-test"], needs="bazel"),
    "sanitizers": Check("C++ tests, with three", ["make", "sanitize"]),
    "soak": Check("100,000 collectives between processes", ["make", "soak"]),
    # With Python 3.13 coverage costs little: it counts lines itself.
    "newest": Check(
        "Python tests on the newest jax, 95 % of the lines",
        ["make", "coverage", "VENV=.venv-3.13"],
        python="3.13",
    ),
    # Its tests of notebooks and pages are those of `make docs`.
    "oldest": Check(
        "C++ and thorough Python tests on the oldest jax",
        ["make", "test", "ARGS=--thorough"],
    ),
}
