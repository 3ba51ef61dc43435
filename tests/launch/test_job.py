"""The status of a run, and that nothing of it stays."""

import os
import selectors

import pytest
import waiting

from jaxcomm.launch import job, process, run, stopping

pytestmark = pytest.mark.multiprocess


def pids(out):
    return [word.split("=")[1] for word in out.split() if word.startswith("pid=")]


def test_all_well(launch):
    before = os.listdir("/proc/self/fd")
    assert launch("", processes=3) == (0, "", "")
    # No descriptor stays.
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(256 + 4)", 4, "process 1 ended with status 4"),
        ("sys.exit('a message')", 1, "[1] a message"),
        ("raise KeyError('mine')", 1, "[1] KeyError: 'mine'"),
        ("os._exit(77)", 77, "process 1 ended with status 77"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "process 1 was ended by SIGSEGV"),
    ],
)
def test_the_first_failure_gives_the_status_and_stops_the_others(
    ending, status, said, launch, assert_gone, temporary
):
    found, out, err = launch(
        "print(f'pid={os.getpid()}'); tell(f'x{i}')\n"
        f"if i == 1: {ending}\n"
        "forever()",
        processes=3,
        grace=0.3,
    )
    assert found == status
    assert said in err
    assert "stopping the others" in err
    assert_gone(pids(out))
    # Nor does any file stay.
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("sees_them", [True, False])
def test_of_failures_seen_together_the_first_counts(
    launch, monkeypatch, tmp_path, is_running, sees_them
):
    """As on a loaded machine, where the launcher comes late, or right after a look."""
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path))
    select = selectors.EpollSelector.select
    late = []
    files = [tmp_path / f"pid{i}" for i in range(3)]

    def has_ended(path):
        return path.exists() and not is_running(path.read_text())

    def come_late(self, timeout=None):
        # Only the job's selector: those of the pumps have no data. Before its first
        # look: epoll is to be asked once.
        if not late and any(key.data for key in self.get_map().values()):
            late.append(True)
            waiting.until(lambda: all(map(has_ended, files)), "all end")
            if not sees_them:
                return []
        return select(self, timeout)

    monkeypatch.setattr(selectors.EpollSelector, "select", come_late)
    status, _, err = launch(
        """
tell(f"pid{i}", str(os.getpid()))
if i < 2:
    before = hear(f"pid{2 if i == 0 else 0}")
    until(lambda: not is_running(before))
os._exit(10 + i)
""",
        processes=3,
    )
    assert late
    assert status == 12
    assert "process 2 ended with status 12" in err


def test_who_is_killed_is_named_though_those_who_saw_it_ended_before(
    launch, monkeypatch, notes
):
    # As a process with a GPU does, which takes a while to end.
    monkeypatch.setattr(job, "PATIENCE_SECONDS", waiting.HANG_SECONDS)
    status, _, err = launch(
        """
if i == 0:
    hear("ready")
    tell("pid", str(os.getpid()))
    os._exit(70)
# It can answer: the launcher waits for it.
signal.signal(signal.SIGUSR1, lambda *_: None)
tell("ready")
pid = int(hear("pid"))
until(lambda: not is_running(pid))
os.kill(os.getpid(), signal.SIGKILL)
""",
        grace=waiting.HANG_SECONDS,
    )
    assert status == 70
    assert "suspect: process 1 " in err.partition("\n")[0], err


def test_the_others_may_end_by_themselves(launch, monkeypatch):
    # They have a moment to say what they know before they are asked to end.
    monkeypatch.setattr(stopping, "_LAST_WORDS_SECONDS", waiting.HANG_SECONDS)
    status, out, _ = launch(
        """
if i == 1:
    tell("pid", str(os.getpid()))
    sys.exit(1)
pid = hear("pid")
until(lambda: not os.path.exists(f"/proc/{pid}"))
print("process 1 is missing")
""",
        grace=waiting.HANG_SECONDS,
    )
    assert (status, out) == (1, "[0] process 1 is missing\n")


def test_sigusr1_goes_only_to_those_that_know_it(launch, monkeypatch, time_passes_at):
    # Where a flight record is dumped; one that does not know it would be ended by it.
    monkeypatch.setattr(job, "PATIENCE_SECONDS", waiting.EXPIRES_SECONDS)
    monkeypatch.setattr(stopping, "_LAST_WORDS_SECONDS", 1000)
    time_passes_at("dumped")
    status, out, _ = launch(
        """
if i == 2:
    hear("ready0")
    hear("ready1")
    sys.exit(3)
if i == 0: signal.signal(signal.SIGUSR1, lambda *_: (print("dumped"), tell("dumped")))
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end"), os._exit(0)))
tell(f"ready{i}")
forever()
""",
        processes=3,
        grace=1000,
    )
    assert status == 3
    lines = sorted(out.splitlines())
    assert lines == ["[0] asked to end", "[0] dumped", "[1] asked to end"]


def test_what_the_processes_have_started_ends_too(launch, assert_gone):
    status, out, _ = launch(
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)\n"
        "print(f'pid={child.pid}')"
    )
    assert status == 0
    assert len(pids(out)) == 2
    assert_gone(pids(out))


def test_no_process_stays_where_the_start_fails(launch, monkeypatch, assert_gone):
    started = []

    def start(*arguments):
        if started:
            raise OSError("no more processes")
        started.append(process.Process(*arguments))
        return started[0]

    monkeypatch.setattr(run, "Process", start)
    with pytest.raises(OSError, match="no more processes"):
        launch("forever()")
    assert_gone([started[0]._popen.pid])
