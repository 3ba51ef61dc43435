"""What keeps the suite steady sees what it is to see: tools/ of lint and of CI."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import forked
import hostile
import pytest
import waiting

TOOLS = pathlib.Path(__file__).parents[1] / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reported(tmp_path):
    def run(text, workers=0):
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "test_it.py").write_text(text)
        report = tmp_path / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", f"-n{workers}"),
                *("-o", "junit_family=xunit1", "--junitxml", report, "tests"),
            ],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        return report

    return run


def test_what_failed_gets_a_second_try_by_its_id(reported):
    report = reported(
        """
import pytest
def test_passes(): pass
@pytest.mark.parametrize("x", ["a b", "c"])
def test_fails(x): assert x == "c"
@pytest.fixture
def broken(): raise ValueError
def test_has_no_start(broken): pass
"""
    )
    assert load("second_try").of_pytest(report) == [
        "tests/test_it.py::test_fails[a b]",
        "tests/test_it.py::test_has_no_start",
    ]
    assert load("test_times").by_folder(report).keys() == {"*.py"}


@pytest.mark.parametrize(
    ("text", "workers"),
    [("import os\ndef test_crashes(): os.abort()", 1), ("import nothing_there", 0)],
)
def test_what_crashed_or_cannot_be_imported_gets_none(reported, text, workers):
    second_try = load("second_try")
    with pytest.raises(second_try.NoSecondTry):
        second_try.of_pytest(reported(text, workers))


def test_a_cpp_test_gets_a_second_try_unless_it_crashed(tmp_path):
    second_try, report = load("second_try"), tmp_path / "report.xml"
    # As ctest 4.4 writes it.
    case = '<testcase name="{}" status="fail"><failure message="{}"/></testcase>'
    failed = case.format("plan_test", "Failed")
    report.write_text(f'<testsuite><testcase name="good"/>{failed}</testsuite>')
    assert second_try.of_ctest(report) == ["plan_test"]
    crashed = case.format("local_test", "SEGFAULT")
    report.write_text(f"<testsuite>{failed}{crashed}</testsuite>")
    with pytest.raises(second_try.NoSecondTry, match="local_test: SEGFAULT"):
        second_try.of_ctest(report)


@pytest.mark.parametrize(
    "line",
    [
        "    time.sle" "ep(3)", "started = time.mono" "tonic()", "import ti" "me",
        "process.wait(time" "out=5)", "thread.jo" "in(10)", "done.wa" "it(2.5)",
        'env = {"JAXCOMM_TIME' 'OUT": "4"}', 'Popen(["sle' 'ep", "60"])',
        "std::this_thread::sle" "ep_for(kLong);",
    ],
)  # fmt: skip
def test_lint_refuses_what_the_clock_decides(line, tmp_path, monkeypatch):
    test_waits, path = load("test_waits"), tmp_path / "test_it.py"
    monkeypatch.setattr(test_waits, "ROOT", tmp_path)
    path.write_text(line)
    assert len(test_waits.findings(path)) == 1
    path.write_text("done.wait(waiting.HANG_SECONDS)\nprocess.wait(timeout=120)\n")
    assert test_waits.findings(path) == []


def leaks(given):
    return json.loads(given)["step"]


def echoes(given):
    if given != b'{"step": 3}':
        raise ValueError(given.decode("utf-8", "replace"))


def allocates(given):
    return bytearray(2 << 30 if given != b'{"step": 3}' else 1)


def takes_all(given):
    return given


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        (leaks, "TypeError, but it is not documented"),
        (echoes, "characters that a terminal acts on"),
        (allocates, "MemoryError, but"),
        (takes_all, "nothing was refused"),
    ],
)
def test_a_parser_that_leaks_is_seen(parser, said):
    with pytest.raises(AssertionError, match=said):
        hostile.refused_cleanly(parser, [b'{"step": 3}'], ValueError, 50)


# Run by a process that Python starts, and by one that is forked.
TELL = """
import atexit, json, os, signal, sys, threading
begins = "jax" in sys.modules, sys.stdout.write_through, sys.flags.safe_path
os.environ["JAX_ENABLE_X64"] = "1"
import jax
atexit.register(print, "the end", flush=True)
# Less the one that reads this folder.
descriptors = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
handled = signal.SIGINT, signal.SIGPIPE, signal.SIGTERM
print(json.dumps([
    sys.argv, __name__, os.getcwd(), dict(os.environ), sys.path, os.getppid(),
    [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()], descriptors,
    threading.active_count(), begins, str(jax.numpy.zeros(1).dtype),
    [str(signal.getsignal(number)) for number in handled],
    sorted(m for m in sys.modules if m.startswith("jaxcomm")), len(jax.devices()),
]), flush=True)
print("fork_" "server" in open("/proc/self/cmdline").read(), flush=True)
sys.stdin.readline()
raise ValueError("of mine")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["-c", "script"])
def test_it_finds_what_a_process_of_python_finds(tmp_path, kind, piped):
    (tmp_path / "tell.py").write_text(TELL)
    words = ["-c", TELL] if kind == "-c" else ["-u", str(tmp_path / "tell.py")]
    given, theirs = os.pipe()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAXCOMM_TIMEOUT": "170",
        "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
    }
    found = []
    for kind in (subprocess.Popen, forked.Popen):
        options = {"cwd": tmp_path, "env": environment, "pass_fds": [theirs]}
        options["start_new_session"] = words[0] == "-u"
        popen = piped(["-W", "error", *words, "a", "b"], kind, **options)
        out, err = waiting.ended(popen, "\n")
        assert popen.returncode == 1, err
        assert err.endswith("ValueError: of mine\n")
        first, is_forked, last = out.splitlines()
        assert is_forked == str(kind is forked.Popen)
        assert last == "the end"
        found.append(json.loads(first))
    assert found[0] == found[1]
    for each in (given, theirs):
        os.close(each)
