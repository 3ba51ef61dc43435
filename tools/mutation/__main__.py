"""Run the tests on defects drawn by a seed: ``make mutation``."""

import argparse
import concurrent.futures
import json
import pathlib
import queue
import sys
import time

from mutation import report
from mutation.defects import draw
from mutation.trial import Records, Tree

ROOT = pathlib.Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
RESULTS = WORK / "results.json"
FOLDERS = [
    "jaxcomm/primitives",
    "jaxcomm/collectives",
    "jaxcomm/communicator",
    "jaxcomm/attention",
]
# What is run to record which lines each test executes. Of tests/nccl, the files that
# run in pytest's own process.
RECORDED = [
    ["tests/primitives", "tests/communicator"],
    ["tests/collectives"],
    ["tests/attention"],
    [
        f"tests/nccl/test_{name}.py"
        for name in (
            *("calls", "policy", "communicators", "symmetric_memory", "library"),
            *("collectives", "failures"),
        )
    ],
    ["tests/test_config.py", "tests/diagnostics", "tests/test_export.py"],
]


class Trees:
    """Copies of the repository, each for one trial at a time."""

    def __init__(self, count: int):
        """Make the copies."""
        self._free: queue.Queue[Tree] = queue.Queue()
        for i in range(count):
            self.first = Tree(ROOT, WORK / f"tree-{i}")
            self._free.put(self.first)
        self._pool = concurrent.futures.ThreadPoolExecutor(count)

    def map(self, function, *items) -> list:
        """Return ``function(tree, *item)`` of all items, so many at once."""

        def one(*item):
            tree = self._free.get()
            try:
                return function(tree, *item)
            finally:
                self._free.put(tree)

        return list(self._pool.map(one, *items))


def main() -> int:
    """Draw, try and report."""
    given = _arguments()
    ends = time.monotonic() + 60 * given.minutes
    if given.fresh:
        RESULTS.unlink(missing_ok=True)
    trees = Trees(given.jobs)
    records = _record(trees, given.fresh or given.record)
    # Of a copy: meanwhile somebody may edit the repository.
    defects = draw(trees.first.folder, given.folders, given.defects, given.seed)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    left = [
        each
        for each in defects
        if results.get(each.name, {}).get("outcome", "survived") == "survived"
        or any(word in each.file for word in given.again)
    ]
    print(
        f"{len(records)} tests; {len(defects)} defects, {len(left)} to try", flush=True
    )

    def one(tree, defect):
        if time.monotonic() > ends:
            return
        result = {"outcome": "survived", "seconds": 0.0}
        for tests, seconds in records.of(defect, given.budget):
            confirms = "::" not in tests[0]
            result = tree.try_defect(defect, tests, 200 + 8 * seconds, confirms)
            if result["outcome"] != "survived":
                break
        print(
            f"{result['outcome']:9}{result['seconds']:6} s  {defect.name}", flush=True
        )
        results[defect.name] = result
        RESULTS.write_text(json.dumps(results, indent=1))

    trees.map(one, left)
    tried = [(each, results[each.name]) for each in defects if each.name in results]
    enough = report.write(given.report, report.PYTHON, tried, len(defects), given.seed)
    return 0 if enough else 1


def _record(trees: Trees, fresh: bool) -> Records:
    """Run the tests once without defects, if that was not done before."""

    def one(tree, number, paths):
        path = WORK / f"record-{number}.json"
        if fresh or not path.exists():
            status = tree.pytest(
                ["-p", "mutation.record", *paths],
                seconds=3600,
                MUTATION_RECORD=str(path),
                PYTHONPATH=f"{tree.folder}:{ROOT / 'tools'}",
            )
            print(f"recorded {paths[0]} ...: exit status {status}", flush=True)
        return path

    return Records(trees.map(one, range(len(RECORDED)), RECORDED))


def _arguments():
    parser = argparse.ArgumentParser(prog="make mutation", description=__doc__)
    add = parser.add_argument
    add("--defects", type=int, default=200, help="how many to draw")
    add("--seed", type=int, default=0, help="draws the defects")
    add("--jobs", type=int, default=2, help="how many to try at once")
    add("--budget", type=float, default=30, help="seconds of tests for a defect")
    add("--minutes", type=float, default=240, help="start no trial after this time")
    add("--folders", nargs="+", default=FOLDERS, help="where to put defects")
    add("--fresh", action="store_true", help="forget what earlier runs found")
    add("--record", action="store_true", help="record anew what tests execute")
    add("--again", nargs="*", default=[], help="files whose defects to try again")
    add("--report", type=pathlib.Path, default=ROOT / "docs" / "mutation.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
