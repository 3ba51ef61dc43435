"""Run every check that a release must pass, and say how each of them ended.

Each check goes on when another fails, and writes to build/release/logs. A check that
this machine cannot run, or only in part, has a reason. It does not count as passed.
What passed for this very tree does not run again: a run that was ended goes on.
"""

import argparse
import subprocess
import sys
import time
from datetime import datetime

from release import environments as env
from release import kept
from release.checks import CHECKS, Check

NOT_REACHED = "NOT RUN: the run was ended"


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


def once(name: str, check: Check, tree: str, run: str) -> tuple[str, float]:
    """Run a check, unless it passed before; return what ``attempt`` returns."""
    inputs = check.inputs(tree)
    if (before := kept.read(name, inputs, check.makes)) is not None:
        print(f"==> {name}: passed in {before[1]}", flush=True)
        return f"passed in {before[1]}", before[0]
    kept.forget(name)
    verdict, seconds = attempt(name, check)
    if kept.tree() != tree:
        verdict = f"FAILED: files of the tree changed while it ran; it {verdict}"
    elif verdict == "passed":
        kept.write(name, inputs, check.makes, seconds, run)
    return verdict, seconds


def table(ended: dict[str, tuple[str, float]]) -> str:
    """Return a line for each check that was chosen, and a sum."""
    lines = [
        f"{name:<11} {seconds:6.0f} s  {verdict} ({CHECKS[name].what})"
        for name, (verdict, seconds) in ended.items()
    ]
    passed = [v.startswith("passed") for v, _ in ended.values()]
    total = sum(seconds for _, seconds in ended.values())
    lines += [
        f"{sum(passed)} of {len(passed)} passed, in {total:.0f} s: {kept.commit()}"
    ]
    left = [name for name in CHECKS if name not in ended]
    return "\n".join([*lines, f"not chosen: {', '.join(left)}"] if left else lines)


def main() -> int:
    """Run the chosen checks; return 0 if all of them ran and passed."""
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__)
    parser.add_argument("--only", help=f"a comma-separated part of {','.join(CHECKS)}")
    parser.add_argument("--skip", default="", help="such a list, to leave out")
    parser.add_argument(
        "--afresh", action="store_true", help="run also what passed before"
    )
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else list(CHECKS)
    skipped = list(filter(None, args.skip.split(",")))
    unknown = sorted({*chosen, *skipped} - set(CHECKS))
    if unknown:
        parser.error(f"no check {unknown}; there are {', '.join(CHECKS)}")
    ended = {name: (NOT_REACHED, 0.0) for name in chosen if name not in skipped}
    if args.afresh:
        for name in ended:
            kept.forget(name)
    tree, run = kept.tree(), f"the run of {datetime.now():%Y-%m-%d %H:%M}"
    try:
        for name in ended:
            ended[name] = once(name, CHECKS[name], tree, run)
    except KeyboardInterrupt:
        print("\nended; the next run goes on here")
    print(f"\n{table(ended)}")
    return int(not all(v.startswith("passed") for v, _ in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
