"""Processes that are forked do as those that Python starts."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import forked
import pytest
import waiting

pytestmark = pytest.mark.multiprocess
PROGRAM = pathlib.Path(__file__).with_name("support") / "tells_of_itself.py"
ENDINGS = {
    "sys.exit(7)": (7, ""),
    "raise ValueError('of mine')": (1, "ValueError: of mine"),
    "os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, ""),
    "raise KeyboardInterrupt": (-signal.SIGINT, "KeyboardInterrupt"),
}


def start(words, kind=forked.Popen, **options):
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


@pytest.mark.parametrize("words", [["-m", PROGRAM.stem], [str(PROGRAM)]])
def test_it_finds_what_a_process_of_python_finds(tmp_path, is_forked, words):
    given, theirs = os.pipe()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAXCOMM_TIMEOUT": "170",
        "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
    }
    found = []
    for kind in (subprocess.Popen, forked.Popen):
        popen = start(
            [*words, "a", "b"], kind, cwd=tmp_path, env=environment, pass_fds=[theirs]
        )
        out, err = waiting.ended(popen, "\n")
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
    program = f"import os, signal, sys\nsys.stdin.readline()\n{ending}"
    popen = start(["-c", program])
    _, err = waiting.ended(popen, "\n")
    status, last = ENDINGS[ending]
    assert popen.returncode == status, err
    assert err.splitlines()[-1:] == [last][: bool(last)]
    assert is_forked == [popen.pid]


def test_signals_reach_it_alone(is_forked):
    popen, other = (
        start(["-c", "import sys\nprint(1, flush=True)\ninput()"]) for _ in range(2)
    )
    for each in (popen, other):
        assert each.stdout.readline() == "1\n"
    popen.send_signal(signal.SIGINT)
    waiting.ended(popen)
    assert popen.returncode == -signal.SIGINT
    assert other.poll() is None
    assert waiting.ended(other, "\n") == ("", "")
    assert is_forked == [popen.pid, other.pid]
    # What it was forked through is gone, and it is reaped.
    assert not os.path.exists(f"/proc/{popen.pid}")


@pytest.mark.parametrize(
    "options",
    [
        {"start_new_session": True},
        {"env": os.environ | {"JAX_ENABLE_X64": "1"}},
        {"env": os.environ | {"COVERAGE_PROCESS_START": "x"}},
    ],
    ids=["session", "configuration", "coverage"],
)
def test_what_forking_cannot_give_python_starts(is_forked, options):
    forked.run([sys.executable, "-c", "pass"], check=True, **options)
    with pytest.raises(subprocess.CalledProcessError):
        forked.run(["false"], check=True)
    assert is_forked == []
