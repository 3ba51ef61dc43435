"""Run the nearest tests on defects in ffi/: ``make mutation-cpp``."""

import argparse
import collections
import json
import os
import pathlib
import shutil
import sys
import time

from mutation import report
from mutation.cpp_defects import of_file
from mutation.defects import Defect, numbered
from mutation.trial import Tree, finished

ROOT = pathlib.Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
RESULTS = WORK / "cpp.json"

_NCCL = r"fake_nccl.*|in_flight_test|nccl_steps_test|engine_choice_test"
_HOST = "local_test|reduce_test|arena_test|crossing.*"
_CORE = f"core_test|plan_test|{_HOST}|fake_nccl_test|refused_threads_test"
_EVERY = "collectives/test_shapes.py collectives/test_dtypes.py"
_PROCESSES = "processes faults/test_killed.py"
_RECORDS = "diagnostics/test_dumps.py diagnostics/test_flight_record.py"
_STOPS = "nccl/test_calls.py nccl/test_failures.py nccl/test_stopped.py"
# By folder, the longest that fits: C++ tests, and files of tests/ if those pass.
NEAREST = {
    "ffi/": (_CORE, f"{_EVERY} test_errors_at_run_time.py"),
    "ffi/python/": ("core_test", "communicator diagnostics"),
    "ffi/flight/": ("flight.*|core_test", _RECORDS),
    "ffi/os/": ("os_test|.*threads_test|crossing.*|flight.*", _PROCESSES),
    "ffi/planners/": (
        "plan_test|local_test",
        f"{_EVERY} collectives/test_ragged_all_to_all.py",
    ),
    "ffi/backends/host/": (_HOST, f"{_EVERY} collectives/test_reproducible.py"),
    "ffi/backends/host/local/": (_HOST, f"{_EVERY} {_PROCESSES}"),
    "ffi/backends/host/arena/": ("arena_test|crossing.*", _PROCESSES),
    "ffi/backends/nccl/": (_NCCL, _STOPS),
}
# A GPU runs them.
_LEFT_OUT = "ffi/backends/nccl/kernels/"
_COPIED = (
    *("ffi", "jaxcomm", "tests", "benchmarks", "examples", "docs"),
    *("CMakeLists.txt", "pyproject.toml", "README.md"),
)


class CppTree(Tree):
    """A private copy of the repository with a build of its own."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path):
        """Copy the sources over those of an earlier run, and build what changed."""
        self.folder, self.build = folder, folder / "build"
        folder.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            for path in [root / name, *(root / name).rglob("*")]:
                copy = folder / path.relative_to(root)
                if path.is_dir():
                    copy.mkdir(exist_ok=True)
                # What is equal keeps its time: ninja builds what is newer.
                elif not copy.exists() or copy.read_bytes() != path.read_bytes():
                    shutil.copy(path, copy)
        configure = [
            *("cmake", "-S", folder, "-B", self.build, "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DJAXCOMM_BUILD_TESTS=ON"),
            "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        if self._run(configure, 600) or self.made():
            sys.exit((folder / "output.txt").read_text()[-3000:])

    def made(self) -> int | None:
        """Build, and put the extension beside the package; return a status."""
        install = ["cmake", "--install", self.build, "--prefix", self.folder]
        return self._run(["cmake", "--build", self.build], 3600) or self._run(
            [*install, "--component", "module"], 60
        )

    def _run(self, words, seconds) -> int | None:
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        output = self.folder / "output.txt"
        return finished(
            words, self.folder, os.environ | {"PATH": path}, output, seconds
        )

    def try_defect_by_nearest(self, defect: Defect) -> dict:
        """Put a defect in, build, run C++ tests and then pytest, and take it out.

        A test that fails must pass without the defect.
        """
        path, began = self.folder / defect.file, time.monotonic()
        text = path.read_text()
        by = ""
        try:
            path.write_text(defect.applied_to(text))
            outcome = "does not compile" if self.made() else "survived"
            if outcome == "survived":
                outcome, by = self._nearest(defect)
        finally:
            path.write_text(text)
        if by and (self.made() or self._test(by)[0] != "survived"):
            outcome = "unclear"
        seconds = round(time.monotonic() - began, 1)
        return {"outcome": outcome, "seconds": seconds, "by": by}

    def _nearest(self, defect) -> tuple[str, str]:
        folder = max(filter(defect.file.startswith, NEAREST), key=len)
        names, files = NEAREST[folder]
        outcome, by = self._test(f"^({names})$")
        if outcome != "survived":
            return outcome, by
        return self._test(*(f"tests/{name}" for name in files.split()))

    def _test(self, *names) -> tuple[str, str]:
        """Run C++ tests by a pattern, or files: what came of it, and who failed."""
        if names[0].startswith("tests/"):
            status = self.pytest(
                ["-x", "-n", "1", *names],
                seconds=900,
                JAXCOMM_TEST_FAKE_NCCL=str(self.build / "libjaxcomm_fake_nccl.so"),
            )
            begin, word = "FAILED ", 1
        else:
            ctest = ["ctest", "--test-dir", self.build, "--stop-on-failure"]
            status = self._run([*ctest, "--timeout", "200", "-R", names[0]], 900)
            begin, word = "\t", 2
        lines = (self.folder / "output.txt").read_text().splitlines()
        failed = [line.split()[word] for line in lines if line.startswith(begin)]
        is_hung = status is None or any(line.endswith("(Timeout)") for line in lines)
        outcome = "survived" if status == 0 else "hung" if is_hung else "caught"
        return outcome, " ".join(failed[:1])


def draw(root: pathlib.Path, count: int, seed: int) -> list[Defect]:
    """Draw defects of all kinds in equal numbers, as far as there are any."""
    found: dict[str, Defect] = {}
    for path in sorted((root / "ffi").rglob("*.cc")):
        if not str(path.relative_to(root)).startswith(_LEFT_OUT):
            for each in of_file(root, path):
                found.setdefault(each.name, each)
    seen: collections.Counter = collections.Counter()
    rounds = []
    for each in sorted(found.values(), key=lambda each: numbered(each, seed)):
        rounds.append((seen[each.kind], numbered(each, seed), each))
        seen[each.kind] += 1
    return [each for *_, each in sorted(rounds, key=lambda row: row[:2])][:count]


def main() -> int:
    """Draw, try and report."""
    parser = argparse.ArgumentParser(prog="make mutation-cpp", description=__doc__)
    parser.add_argument("--defects", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="draws the defects")
    parser.add_argument("--minutes", type=float, default=120, help="start none after")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument(
        "--report", type=pathlib.Path, default=ROOT / "docs/mutation.md"
    )
    given = parser.parse_args()
    if given.fresh:
        RESULTS.unlink(missing_ok=True)
        shutil.rmtree(WORK / "cpp", ignore_errors=True)
    ends = time.monotonic() + 60 * given.minutes
    tree = CppTree(ROOT, WORK / "cpp")
    defects = draw(tree.folder, given.defects, given.seed)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for each in defects:
        if each.name in results or time.monotonic() > ends:
            continue
        found = results[each.name] = tree.try_defect_by_nearest(each)
        print(f"{found['outcome']:9}{found['seconds']:6} s  {each.name}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1))
    tried = [(each, results[each.name]) for each in defects if each.name in results]
    report.write(given.report, report.CPP, tried, len(defects), given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
