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


def start(words, kind=forked.Popen, **options):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-W", "error", *words]
    return kind(words, text=True, **pipes, **options)


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


def test_signals_and_exceptions_end_it_alone(is_forked):
    program = "import sys\nprint(1, flush=True)\ninput()\nraise ValueError('of mine')"
    popen, other = (start(["-c", program]) for _ in range(2))
    for each in (popen, other):
        assert each.stdout.readline() == "1\n"
    popen.send_signal(signal.SIGINT)
    assert waiting.ended(popen)[1].endswith("KeyboardInterrupt\n")
    assert popen.returncode == -signal.SIGINT
    assert other.poll() is None
    assert waiting.ended(other, "\n")[1].endswith("ValueError: of mine\n")
    assert other.returncode == 1
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
