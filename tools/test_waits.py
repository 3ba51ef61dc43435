"""Refuse tests whose outcome the clock may decide; part of ``make lint``.

``tests/support/waiting.py`` and ``tests/ffi/waiting.h`` own waiting. All other tests
must not sleep, read a clock or set a timeout of less than 30 s, nor may the programs
that they start. A wait that must not expire gets ``HANG_SECONDS``, one that nothing
can end ``EXPIRES_SECONDS``. The stand-in for NCCL may poll, as NCCL does.

Exits with 1 and one line for each finding.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWNERS = {"tests/support/waiting.py", "tests/ffi/waiting.h"}
LEAST_SECONDS = 30

_NUMBER = r"(?P<seconds>\d+(?:\.\d*)?|\.\d+)\b(?!\s*\*)"
_CLOCK = re.compile(
    r"\btime\.(sleep|time|monotonic|perf_counter)\b|^\s*(import time\b|from time )"
    r"|\bsleep_(for|until)\b|\b(steady|system|high_resolution)_clock::now\b"
    r"|(?<![.\w])(?<!def )u?sleep\(|[\"'`]sleep[\"'` ]|\bwait_for\([^)]*chrono::"
)
_TIMEOUTS = [
    re.compile(rf"\b(?:timeout|deadline|patience\w*|\w*timeout_seconds)=\s*{_NUMBER}"),
    re.compile(rf"\.(?:wait|join|communicate|wait_for)\(\s*(?:timeout=)?{_NUMBER}\)"),
    re.compile(rf"JAXCOMM_TIMEOUT[\"']?\s*[]:=,]+\s*[\"']?{_NUMBER}"),
]


def findings(path: Path) -> list[str]:
    """Return what a file does that only the owners of waiting may."""
    found = []
    name = path.relative_to(ROOT).as_posix()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        at = f"{name}:{number}: {line.strip()[:80]!r}"
        if _CLOCK.search(line):
            found.append(f"{at} waits for the clock")
        elif any(
            _is_short(match) for each in _TIMEOUTS for match in each.finditer(line)
        ):
            found.append(f"{at} has a timeout under {LEAST_SECONDS} s")
    return found


def _is_short(match):
    # 0 is no wait.
    return 0 < float(match["seconds"]) < LEAST_SECONDS


def main() -> int:
    """Look at all files; return the exit status."""
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("*"))
        if path.suffix in (".py", ".cc", ".h")
        and not path.stem.endswith("_bench")
        and "doubles" not in path.parts
        and path.relative_to(ROOT).as_posix() not in OWNERS
    ]
    found = [each for path in files for each in findings(path)]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print("Wait by tests/support/waiting.py or tests/ffi/waiting.h.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
