"""Jobs that start again, from the first attempt to the last."""

import itertools
import re
import signal

import pytest
import waiting

from jaxcomm.launch import attempt, process

pytestmark = pytest.mark.multiprocess

# A process that is killed may be started again though it never asked for devices.
DIE = "os.kill(os.getpid(), signal.SIGKILL)\n"
NTH = "nth = int(os.environ['JAXCOMM_RESTART_COUNT'])\n"


def said(err):
    """Keeps what the launcher says about restarts."""
    text = r"^jaxcomm.launch: ((?:restart|not restarted|done)\b.*)"
    return re.findall(text, err, re.M)


def test_a_job_that_always_dies_ends_after_the_restarts(launch):
    names = ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID")
    status, out, err = launch(
        f"""
print(*(os.environ["JAXCOMM_" + name] for name in {names}),
      os.environ["JAX_COORDINATOR_ADDRESS"], flush=True)
os.kill(os.getpid(), signal.SIGSEGV if os.environ["JAXCOMM_RESTART_COUNT"] == "2"
        else signal.SIGKILL)""",
        processes=1,
        max_restarts=2,
    )
    # That of the last failure.
    assert status == 139
    found = [line.split()[1:] for line in out.splitlines()]
    assert [words[:2] for words in found] == [[str(i), "2"] for i in range(3)]
    runs, addresses = ([words[i] for words in found] for i in (2, 3))
    assert len(set(runs)) == 1
    # A late packet for the process before must not reach the next one.
    assert all(a != b for a, b in itertools.pairwise(addresses))
    death = "process 0 was ended by SIGKILL"
    assert said(err) == [
        *(f"restart {i} of 2: {death}" for i in (1, 2)),
        "not restarted: process 0 was ended by SIGSEGV, after all 2 restarts",
    ]


def test_a_bug_at_the_start_is_not_run_again(launch):
    status, _, err = launch("import no_such_module", max_restarts=1000, grace=0.3)
    assert status == 1
    assert "No module named 'no_such_module'" in err
    (text,) = said(err)
    assert re.match(r"not restarted: process [01] ended with status 1 before all", text)


@pytest.mark.parametrize(
    ("has_port", "number", "death", "told"),
    [
        # The one that serves the store.
        (True, 0, DIE, "was ended by SIGKILL"),
        pytest.param(
            *(False, 1, "sys.exit(3)", "ended with status 3"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_whoever_dies_the_processes_find_each_other_again(
    has_port, number, death, told, launch, sums_device_ids, free_port
):
    status, out, err = launch(
        f"""{NTH}{sums_device_ids}
# The other one has said its sum.
tell(f"sum of {{i}} in {{nth}}")
hear(f"sum of {{1 - i}} in {{nth}}")
if nth == 0 and i == {number}: {death}
""",
        coordinator_port=free_port if has_port else 0,
        max_restarts=5,
        grace=0.3,
    )
    assert status == 0, err
    assert len(re.findall("process . of 2 devices 1 of 2 right", out)) == 4
    assert said(err) == [
        f"restart 1 of 5: process {number} {told}", "done after 1 restart",
    ]  # fmt: skip


def test_one_that_was_done_starts_again_with_the_others(launch):
    status, out, err = launch(
        f"""{NTH}
if i == 0:
    print("done", flush=True)
    tell("pid", str(os.getpid()))
    sys.exit(0)
if nth == 0:
    pid = hear("pid")
    # Process 0 has ended, not only spoken.
    until(lambda: not os.path.exists(f"/proc/{{pid}}"))
    {DIE}""",
        max_restarts=1,
    )
    assert status == 0, err
    assert out == "[0] done\n" * 2


def test_one_that_cannot_be_started_again_is_a_failure(
    launch, monkeypatch, assert_gone
):
    started = []

    def start(number, options, environment, *rest):
        if environment["JAXCOMM_RESTART_COUNT"] == "1" and number == 1:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(process.Process(number, options, environment, *rest))
        return started[-1]

    monkeypatch.setattr(attempt, "Process", start)
    status, _, err = launch(
        f"{NTH}if nth == 0: {DIE}\nif nth == 1: forever()",
        max_restarts=2,
    )
    assert status == 0, err
    assert "process 1 cannot be started: [Errno 11] Resource temporarily" in err
    assert said(err)[1] == "restart 2 of 2: process 1 ended with status 126"
    assert len(started) == 5
    assert_gone([each.pid for each in started])


def test_of_an_attempt_its_records_alone_are_left_when_the_next_begins(
    launch, tmp_path, notes
):
    status, out, err = launch(
        f"""{NTH}
file = "{tmp_path}/pid"
if nth == 0:
    tell("flight-record-0.json")
    # Of the session, but not of the group that is killed with the process.
    waits = [sys.executable, "-c", "import waiting; waiting.forever()"]
    child = subprocess.Popen(waits, process_group=0)
    open(f"/dev/shm/jaxcomm-{{os.getpid()}}-1", "w").close()
    with open(file, "w") as to: to.write(f"{{child.pid}} {{os.getpid()}}")
    {DIE}
child, dead = open(file).read().split()
print("shared memory", os.path.exists(f"/dev/shm/jaxcomm-{{dead}}-1"))
print("running", is_running(child))
""",
        processes=1,
        max_restarts=1,
    )
    assert status == 0, err
    assert out == "[0] shared memory False\n[0] running False\n"
    (kept,) = notes.rglob("flight-record-0.json")
    assert kept.parent.name == "attempt-0"
    # That of the last attempt would be empty.
    assert len(list(notes.iterdir())) == 1


def test_the_time_of_a_run_is_for_all_attempts(launch, time_passes_at, assert_gone):
    # More than half of it passes in each.
    for attempt_number in range(2):
        time_passes_at(f"attempt-{attempt_number}/begun", seconds=600)
    time_passes_at("attempt-1/begun")  # the last words
    status, out, err = launch(
        f"""{NTH}
print(os.getpid())
tell("begun")
if nth == 1: forever()
hear("begun passed")
{DIE}""",
        processes=1,
        max_restarts=1,
        timeout=1000.0,
    )
    assert status == 124
    assert_gone(out.replace("[0]", "").split())
    assert "--timeout: not done after 1000 s" in err
    assert said(err) == ["restart 1 of 1: process 0 was ended by SIGKILL"]


def test_a_signal_while_failed_processes_stop_is_heeded(
    started, program, assert_gone, tmp_path
):
    launcher = started(
        "-n", "2", "--max-restarts=9", "--grace=1000",
        program(
            f"""
if i == 1:
    hear("ready")
    {DIE}
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
print(f"pid={{os.getpid()}}", flush=True)
tell("ready")
forever()
"""
        ),
    )  # fmt: skip
    pid = launcher.stdout.readline().split("pid=")[1]
    assert "asked to end" in launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    _, err = waiting.ended(launcher)
    # As without restarts: the failure came first.
    assert launcher.returncode == 137
    assert said(err) == []
    assert_gone([pid])


def test_where_nobody_reads_the_output_nothing_starts_again(started, program):
    launcher = started(
        "-n", "1", "--max-restarts=3", "--grace=0.3",
        program("while True: print('more', flush=True)"),
    )  # fmt: skip
    assert launcher.stdout.readline() == "[0] more\n"
    launcher.stdout.close()
    err = launcher.stderr.read()
    assert launcher.wait(waiting.HANG_SECONDS) == 1
    assert "BrokenPipeError" in err
    assert said(err) == []
