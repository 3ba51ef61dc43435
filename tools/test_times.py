"""Compare the time of the tests of each folder with its budget.

``make times`` writes the seconds of the last ``make test`` into ``tests/times.toml``.
``make lint`` compares them with the budgets that stand there: a folder that takes
more, or has no budget, fails. Nothing is timed by that; who makes tests slower sees it
when the figures are written, and takes the seconds from other tests.
"""

import argparse
import pathlib
import re
import sys
import tomllib
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests" / "times.toml"


def by_folder(report: pathlib.Path) -> dict[str, float]:
    """Return the seconds of each folder of a report of pytest's."""
    seconds: dict[str, float] = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        parts = case.get("file", "").split("/")
        folder = parts[1] if len(parts) > 2 else "*.py"
        seconds[folder] = seconds.get(folder, 0.0) + float(case.get("time", 0))
    return seconds


def over(times: dict, folders: set[str]) -> list[str]:
    """Return in words which folders break their budget, or have none."""
    found = [
        f"tests/{name} takes {seconds} s; its budget is {times['budget'].get(name, 0)}"
        for name, seconds in times["seconds"].items()
        if seconds > times["budget"].get(name, 0)
    ]
    without = sorted(folders - set(times["budget"]))
    return found + [f"tests/{name} has no budget" for name in without]


def written(text: str, seconds: dict[str, float]) -> str:
    """Return the file's text with other seconds."""
    lines = [f'"{name}" = {seconds[name]:.0f}\n' for name in sorted(seconds)]
    return re.sub(r"(?s)(?<=\[seconds\]\n).*", lambda _: "".join(lines), text)


def main() -> int:
    """Compare, or write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=pathlib.Path, help="from this report of pytest")
    given = parser.parse_args()
    tested = (ROOT / "tests").rglob("test_*.py")
    names = (path.relative_to(ROOT / "tests").parts for path in tested)
    folders = {parts[0] if len(parts) > 1 else "*.py" for parts in names}
    if given.write:
        seconds = by_folder(given.write)
        if left := sorted(folders - set(seconds)):
            print(f"{given.write} is not of all tests: tests/{left[0]} is not in it")
            return 1
        TIMES.write_text(written(TIMES.read_text(), seconds))
    found = over(tomllib.loads(TIMES.read_text()), folders)
    for each in found:
        print(f"{each}: see {TIMES.relative_to(ROOT)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
