"""Run ``make test`` or ``make smoke``, then once more what failed; part of ``.ci/run``.

At most three failed tests get a second try, and none that crashed or took too long. If
all pass then, the run passes, and the last lines name them. Each is a debt: mend the
test, or the product.
"""

import functools
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as xml

MOST = 3
_PYTHON_TESTS = {"test": "pytest", "smoke": "smoke-tests"}
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


def main(target: str, *variables: str) -> int:
    """Run the tests, and what failed; return the exit status.

    Args:
      target: of make, ``test`` or ``smoke``.
      variables: of make, such as ``VENV=.venv-3.13``.
    """
    make = functools.partial(_make, *variables)
    reports = pathlib.Path(_output("make", "--silent", "reports", *variables))
    cpp, python = reports / "ctest.xml", reports / "pytest.xml"
    for report in (cpp, python):
        report.unlink(missing_ok=True)
    status = make(target)
    if status == 0:
        return 0
    try:
        names = of_ctest(cpp) if cpp.exists() else []
        if names and not python.exists():
            make("pytest")
        if not python.exists():
            raise NoSecondTry("no Python test has run")
        ids = of_pytest(python)
    except (NoSecondTry, xml.ParseError) as error:
        print(f"No second try: {error}")
        return status
    failed = [*names, *ids]
    if not 0 < len(failed) <= MOST:
        print(f"No second try: {len(failed)} tests failed; at most {MOST} get one.")
        return status
    for name in names:
        status = make("cpptest", f"CTEST_ARGS=-R ^{name}$$")
        if status != 0:
            return status
    alone = reports / "second-try.txt"
    for name in ids:
        alone.write_text(name + "\n")  # A name may hold what a shell would change.
        status = make(_PYTHON_TESTS[target], "TEST_WORKERS=0", f"ARGS=@{alone}")
        if status != 0:
            return status
    for name in failed:
        print(f"passed at the second try: {name}")
    return 0


def _make(*words):
    print("==> make", *words, flush=True)
    return subprocess.run(["make", *words]).returncode


def _output(*command):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
