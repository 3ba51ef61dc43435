"""Processes that are forked do as those that Python starts."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import forked
import pytest

PROGRAM = pathlib.Path(__file__).with_name("support") / "tells_of_itself.py"
ENDINGS = {
    "": 0,
    "sys.exit(7)": 7,
    "raise ValueError('of mine')": 1,
    "os._exit(3)": 3,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
}


def start(kind, words, **options):
    return kind(
        [sys.executable, "-W", "error", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def is_forked(monkeypatch):
    """Gives a list that grows with each process that is forked."""
    pids = []
    fork = forked._Server.fork

    def fork_and_note(*arguments):
        pids.append(fork(*arguments))
        return pids[-1]

    monkeypatch.setattr(forked._Server, "fork", fork_and_note)
    return pids


@pytest.mark.parametrize(
    "words",
    [["-c", PROGRAM.read_text()], ["-m", PROGRAM.stem], [str(PROGRAM)]],
    ids=["-c", "-m", "script"],
)
def test_it_finds_what_a_process_of_python_finds(tmp_path, is_forked, words):
    given, theirs = os.pipe()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAXCOMM_TIMEOUT": "17",
        "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
    }
    found = []
    for kind in (subprocess.Popen, forked.Popen):
        popen = start(
            kind, [*words, "a", "b"], cwd=tmp_path, env=environment, pass_fds=[theirs]
        )
        out, err = popen.communicate("\n", timeout=100)
        assert popen.returncode == 0, err
        first, last = out.splitlines()
        assert last == "the end"
        found.append(json.loads(first))
    assert found[0] == found[1]
    assert found[0]["parent"] == os.getpid()
    assert found[0]["devices"] == 3
    assert len(is_forked) == 1
    for each in (given, theirs):
        os.close(each)


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_a_process_of_python_does(is_forked, ending):
    for kind in (subprocess.Popen, forked.Popen):
        program = f"import os, signal, sys\nsys.stdin.readline()\n{ending}"
        popen = start(kind, ["-c", program])
        _, err = popen.communicate("\n", timeout=100)
        assert popen.returncode == ENDINGS[ending], err
        last = err.splitlines()[-1:]
        assert last == {1: ["ValueError: of mine"], -2: ["KeyboardInterrupt"]}.get(
            popen.returncode, []
        )
    assert is_forked == [popen.pid]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_alone(is_forked, number):
    popen, other = (
        start(forked.Popen, ["-c", "import sys, time\nprint(1, flush=True)\ninput()"])
        for _ in range(2)
    )
    for each in (popen, other):
        assert each.stdout is not None
        assert each.stdout.readline() == "1\n"
    popen.send_signal(number)
    popen.communicate(timeout=100)
    assert popen.returncode == -number
    assert other.poll() is None
    assert other.communicate("\n", timeout=100) == ("", "")
    assert is_forked == [popen.pid, other.pid]
    # What it was forked through is gone, and it is reaped.
    assert not os.path.exists(f"/proc/{popen.pid}")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-c", "pass"], {"start_new_session": True}),
        (["-X", "importtime", "-c", "pass"], {}),
        (["-c", "pass"], {"env": os.environ | {"JAX_ENABLE_X64": "1"}}),
        (["-c", "pass"], {"env": os.environ | {"MALLOC_ARENA_MAX": "1"}}),
        (["-c", "pass"], {"env": os.environ | {"COVERAGE_PROCESS_START": "x"}}),
    ],
    ids=["session", "option", "configuration", "variable", "coverage"],
)
def test_what_forking_cannot_give_python_starts(is_forked, words, options):
    done = forked.run([sys.executable, *words], capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert is_forked == []


def test_a_command_that_is_no_python_is_started(is_forked):
    assert forked.run(["true"], check=True).returncode == 0
    with pytest.raises(subprocess.CalledProcessError):
        forked.run(["false"], check=True)
    assert is_forked == []
