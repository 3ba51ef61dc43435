"""The status of a run, and that nothing of it stays."""

import os
import pathlib
import selectors
import signal

import pytest
import waiting

from jaxcomm.launch import attempt, job, process

pytestmark = pytest.mark.multiprocess

# Long enough that only a stop can end it within a test.
FOREVER = "forever()"


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
    ending, status, said, launch, assert_gone
):
    found, out, err = launch(
        f"print(f'pid={{os.getpid()}}')\nif i == 1: {ending}\n{FOREVER}",
        processes=3,
        grace=0.3,
    )
    assert found == status
    assert said in err
    assert "stopping the others" in err
    assert_gone(pids(out))


def test_a_process_that_a_debugger_holds_when_it_ends(launch, monkeypatch):
    """Its descriptor says that it has ended, and the system that it has not."""
    has_ended = process.Process.has_ended
    asked = []

    def not_at_first(self):
        asked.append(self.number)
        if asked.count(self.number) > 1:
            return has_ended(self)
        # The debugger lets go of it, and the system tells of it again.
        os.kill(os.getpid(), signal.SIGCHLD)
        return False

    monkeypatch.setattr(process.Process, "has_ended", not_at_first)
    assert launch("sys.exit(5 * i)", processes=2)[0] == 5


@pytest.mark.parametrize("sees_them", [True, False])
def test_of_failures_seen_together_the_first_counts(
    launch, monkeypatch, tmp_path, is_running, sees_them
):
    """As on a loaded machine, where the launcher comes late, or right after a look."""
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path))
    select = selectors.EpollSelector.select
    late = []

    def has_ended(i):
        path = tmp_path / f"pid{i}"
        return path.exists() and not is_running(path.read_text())

    def come_late(self, timeout=None):
        # Only the job's selector: those of the pumps have no data. Before its first
        # look: epoll is to be asked once.
        if not late and any(key.data for key in self.get_map().values()):
            late.append(True)
            waiting.until(lambda: all(map(has_ended, range(3))), "all end")
            if not sees_them:
                return []
        return select(self, timeout)

    monkeypatch.setattr(selectors.EpollSelector, "select", come_late)
    status, _, err = launch(
        """
tell(f"pid{i}", str(os.getpid()))
def ended(i):
    with open(f"/proc/{open(note(f'pid{i}')).read()}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
before = {2: None, 0: 2, 1: 0}[i]
if before is not None:
    hear(f"pid{before}")
    until(lambda: ended(before))
os._exit(10 + i)
""",
        processes=3,
    )
    assert late
    assert status == 12
    assert "process 2 ended with status 12" in err


def test_a_process_that_waits_at_its_end_has_failed_already(launch):
    # As JAX does, for the others.
    status, _, err = launch(
        f"import atexit\natexit.register(forever)\nif i == 1: sys.exit(9)\n{FOREVER}",
        grace=0.3,
    )
    assert status == 9
    assert "process 1 ended with status 9; stopping the others" in err


def test_the_others_may_end_by_themselves(launch, monkeypatch):
    # They have a moment to say what they know before they are asked to end.
    monkeypatch.setattr(job, "_LAST_WORDS_SECONDS", waiting.HANG_SECONDS)
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
    monkeypatch.setattr(job, "_LAST_WORDS_SECONDS", 1000)
    time_passes_at("dumped")
    status, out, _ = launch(
        f"""
if i == 2:
    hear("ready0")
    hear("ready1")
    sys.exit(3)
if i == 0: signal.signal(signal.SIGUSR1, lambda *_: (print("dumped"), tell("dumped")))
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end"), os._exit(0)))
tell(f"ready{{i}}")
{FOREVER}
""",
        processes=3,
        grace=1000,
    )
    assert status == 3
    lines = sorted(out.splitlines())
    assert lines == ["[0] asked to end", "[0] dumped", "[1] asked to end"]


def test_whoever_does_not_heed_an_interruption_is_asked_for_its_record(
    launch, monkeypatch, time_passes_at
):
    monkeypatch.setattr(job, "_LAST_WORDS_SECONDS", 500)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        time_passes_at(number.name)
    status, out, err = launch(
        f"""
if i == 1:
    signal.signal(signal.SIGINT, lambda *_: (print("heeds"), os._exit(0)))
    tell("ready", str(os.getpid()))
    {FOREVER}

def get(number, _):
    name = signal.Signals(number).name
    print("got", name)
    if number == signal.SIGINT: until(lambda: not os.path.exists(f"/proc/{{other}}"))
    tell(name)

for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, get)
hear("ready")
other = open(note("ready")).read()
os.kill(os.getppid(), signal.SIGINT)
{FOREVER}
""",
        grace=1000,
    )
    assert status == 130
    assert sorted(out.splitlines()) == [
        "[0] got SIGINT", "[0] got SIGTERM", "[0] got SIGUSR1", "[1] heeds",
    ]  # fmt: skip
    assert [line.split()[-1] for line in out.splitlines() if line[1] == "0"] == [
        "SIGINT", "SIGUSR1", "SIGTERM",
    ]  # fmt: skip
    assert "still running, now killed: 0" in err


def test_what_the_processes_have_started_ends_too(launch, assert_gone):
    status, out, _ = launch(
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)\n"
        "print(f'pid={child.pid}')"
    )
    assert status == 0
    assert len(pids(out)) == 2
    assert_gone(pids(out))


def test_the_run_may_be_given_a_time(launch, assert_gone, time_passes_at):
    time_passes_at("0 runs", "1 runs", seconds=1000)
    time_passes_at("0 runs")  # their last words
    status, out, err = launch(
        f"print(f'pid={{os.getpid()}}'); tell(f'{{i}} runs'); {FOREVER}", timeout=900.0
    )
    assert status == 124
    assert "--timeout: not done after 900 s" in err
    assert len(pids(out)) == 2
    assert_gone(pids(out))


def test_no_file_stays(launch, tmp_path):
    status, out, _ = launch("print(note('')); tell('x'); sys.exit(1)", processes=1)
    folder = pathlib.Path(out.strip().removeprefix("[0] "))
    assert status == 1
    assert folder.parent == tmp_path / "temporary"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_process_stays_where_the_start_fails(launch, monkeypatch, assert_gone):
    started = []

    def start(*arguments):
        if started:
            raise OSError("no more processes")
        started.append(process.Process(*arguments))
        return started[0]

    monkeypatch.setattr(attempt, "Process", start)
    with pytest.raises(OSError, match="no more processes"):
        launch(FOREVER)
    assert_gone([started[0]._popen.pid])
