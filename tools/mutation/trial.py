"""Which tests execute a line, and whether they notice a defect in it."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from mutation.defects import Defect

# Tests of some files run them in processes of their own, where nobody records.
IN_PROCESSES = {
    "jaxcomm/communicator/backends/nccl/": [
        "tests/nccl/test_stopped.py",
        "tests/nccl/test_processes.py",
    ],
    "jaxcomm/communicator/": [
        "tests/processes/test_rendezvous.py",
        "tests/processes/test_communicators.py",
    ],
    "jaxcomm/primitives/batching.py": ["tests/collectives/test_reproducible.py"],
}
_COPIED = ("jaxcomm", "tests", "benchmarks", "examples", "docs", "README.md")


def finished(words, folder, environment, output, seconds: float) -> int | None:
    """Run a program; return its exit status, or None if it took too long."""
    popen = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return popen.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # With whatever its tests started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


class Tree:
    """A private copy of the repository, in which one defect at a time is put."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path):
        """Copy what tests import and read."""
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in (*_COPIED, "pyproject.toml"):
            source = root / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "ffi", "notebooks")
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy(source, folder / name)

    def pytest(self, words, *, seconds: float, **environment: str) -> int | None:
        """Run pytest there; return its exit status, or None if it took too long."""
        cache = self.folder.parent / "compiled"
        return finished(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
            self.folder,
            os.environ
            | {
                "PYTHONPATH": str(self.folder),
                # A defect must not be passed over for a file compiled without it.
                "PYTHONDONTWRITEBYTECODE": "1",
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            | environment,
            self.folder / "output.txt",
            seconds,
        )

    def try_defect(
        self, defect: Defect, tests: list[str], seconds: float, confirms: bool
    ) -> dict:
        """Put a defect in, run tests, and take it out again.

        If ``confirms``, a test that fails must pass without the defect.
        """
        path = self.folder / defect.file
        text = path.read_text()
        began = time.monotonic()
        try:
            path.write_text(defect.applied_to(text))
            status = self.pytest(["-x", *tests], seconds=seconds)
        finally:
            path.write_text(text)
        lines = (self.folder / "output.txt").read_text().splitlines()
        # An id may hold blanks.
        failed = [
            each.removeprefix("FAILED ").partition(" - ")[0]
            for each in lines
            if each.startswith("FAILED ")
        ]
        outcome = {0: "survived", None: "hung"}.get(status, "caught")
        # On a busy machine a test of processes may fail by itself.
        if outcome == "caught" and failed and confirms:
            outcome = "survived" if self.pytest(failed, seconds=seconds) else "caught"
        return {
            "outcome": outcome,
            "seconds": round(time.monotonic() - began, 1),
            "tests": len(tests),
            "by": failed[0] if failed and outcome == "caught" else "",
        }


class Records:
    """Find the tests that execute a line, and how long they take."""

    def __init__(self, paths: list[pathlib.Path]):
        """Read what the plugin ``record`` wrote."""
        self._tests = {}
        for path in paths:
            for test, record in json.loads(path.read_text()).items():
                if "unusable" not in record:
                    self._tests[test] = record

    def __len__(self) -> int:
        return len(self._tests)

    def of(self, defect: Defect, budget: float) -> list[tuple[list[str], float]]:
        """Return the tests that execute a line, in rounds of growing length.

        Each function's first case comes first, the quickest function at the front.

        Args:
          defect: in the line.
          budget: seconds of the first round. The second has five times as many.

        Returns:
          Rounds: ids of tests, and the seconds that they took when they were recorded.
        """
        users = [
            (record["seconds"], test, record["lines"][defect.file])
            for test, record in self._tests.items()
            if defect.file in record["lines"]
        ]
        # A line that runs at import concerns all that use the file.
        found = [
            (seconds, test)
            for seconds, test, lines in users
            if defect.shown_at in lines
        ] or [(seconds, test) for seconds, test, _ in users]
        cases: dict[str, int] = {}
        ordered = []
        for seconds, test in sorted(found):
            function = test.partition("[")[0]
            cases[function] = cases.get(function, -1) + 1
            ordered.append((cases[function], seconds, test))
        rounds: list[tuple[list[str], float]] = [([], 0.0), ([], 0.0)]
        for _, seconds, test in sorted(ordered):
            for number, longest in enumerate((budget, 5 * budget)):
                chosen, total = rounds[number]
                if not chosen or (total + seconds < longest and len(chosen) < 150):
                    rounds[number] = [*chosen, test], total + seconds
                    break
        for folder, tests in IN_PROCESSES.items():
            if defect.file.startswith(folder):
                rounds.append((tests, 60.0))
                break
        return [each for each in rounds if each[0]]
