"""Run ``make test``; run what failed once more, alone; part of ``.ci/run``.

At most three failed tests get a second try, and none that crashed or took too long. If
all pass then, the run passes, and the last lines name them. Each is a debt: mend the
test, or the product.
"""

import pathlib
import subprocess
import sys
import xml.etree.ElementTree as xml

MOST = 3
# ctest's word for a test that returned something else than 0.
_FAILED = "Failed"
# In pytest's words.
_NO_FAILURE = "crashed while running", "collection failure"


class NoSecondTry(Exception):
    """A failure that a second try must not hide."""


def of_ctest(report: pathlib.Path) -> list[str]:
    """Return the names of the C++ tests that failed.

    Raises:
      NoSecondTry: one crashed or took too long.
    """
    failed = []
    for case in xml.parse(report).getroot().iter("testcase"):
        if (failure := case.find("failure")) is not None:
            if failure.get("message") != _FAILED:
                raise NoSecondTry(f"{case.get('name')}: {failure.get('message')}")
            failed.append(case.get("name", ""))
    return failed


def of_pytest(report: pathlib.Path) -> list[str]:
    """Return the ids of the Python tests that failed, in their set-up or end too.

    Raises:
      NoSecondTry: one crashed or took too long, which ends its process, or a file
        cannot be imported.
    """
    failed = []
    for case in xml.parse(report).getroot().iter("testcase"):
        troubles = [*case.findall("failure"), *case.findall("error")]
        if not troubles:
            continue
        words = f"{case.get('name')}: {troubles[0].get('message')}"
        if any(each in words for each in _NO_FAILURE):
            raise NoSecondTry(words)
        failed.append(f"{case.get('file')}::{case.get('name')}")
    return list(dict.fromkeys(failed))


def main(reports: pathlib.Path) -> int:
    """Run the tests, and what failed; return the exit status.

    Args:
      reports: the folder in which make leaves ctest.xml and pytest.xml.
    """
    cpp, python = reports / "ctest.xml", reports / "pytest.xml"
    for report in (cpp, python):
        report.unlink(missing_ok=True)
    status = _make("test")
    if status == 0:
        return 0
    try:
        if not cpp.exists():
            raise NoSecondTry("the build failed")
        names = of_ctest(cpp)
        if names and not python.exists():
            _make("pytest")
        ids = of_pytest(python)
    except (NoSecondTry, FileNotFoundError, xml.ParseError) as error:
        print(f"No second try: {error}")
        return status
    failed = [*names, *ids]
    if not 0 < len(failed) <= MOST:
        print(f"No second try: {len(failed)} tests failed; at most {MOST} get one.")
        return status
    for name in names:
        status = _make("cpptest", f"CTEST_ARGS=-R ^{name}$$")
        if status != 0:
            return status
    alone = reports / "second-try.txt"
    for name in ids:
        alone.write_text(name + "\n")  # A name may hold what a shell would change.
        status = _make("pytest", "TEST_WORKERS=0", f"ARGS=@{alone}")
        if status != 0:
            return status
    for name in failed:
        print(f"passed at the second try: {name}")
    return 0


def _make(*words):
    print("==> make", *words, flush=True)
    return subprocess.run(["make", *words]).returncode


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
