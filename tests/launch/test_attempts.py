"""Jobs that start again, from the first attempt to the last."""

import re

import ports
import pytest

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
      flush=True)
os.kill(os.getpid(), signal.SIGSEGV if os.environ["JAXCOMM_RESTART_COUNT"] == "2"
        else signal.SIGKILL)""",
        processes=1,
        max_restarts=2,
    )
    # That of the last failure.
    assert status == 139
    found = [line.split()[1:] for line in out.splitlines()]
    assert [words[:2] for words in found] == [[str(i), "2"] for i in range(3)]
    assert len({words[2] for words in found}) == 1
    death = "process 0 was ended by SIGKILL"
    assert said(err) == [
        *(f"restart {i} of 2: {death}" for i in (1, 2)),
        "not restarted: process 0 was ended by SIGSEGV, after all 2 restarts",
    ]


def test_a_program_that_was_called_wrongly_does_not_start_again(launch):
    """Wrong arguments stay wrong."""
    status, _, err = launch("sys.exit(2)", processes=1, max_restarts=2)
    assert status == 2
    (told,) = said(err)
    assert told.startswith("not restarted: process 0 ended with status 2, which says")


def test_if_the_first_dies_the_processes_find_each_other_again(launch, sums_device_ids):
    """It serves the store. If another dies: examples/test_restarts.py."""
    status, out, err = launch(
        f"""{NTH}{sums_device_ids}
# The other one has said its sum.
tell(f"sum of {{i}} in {{nth}}")
hear(f"sum of {{1 - i}} in {{nth}}")
if nth == 0 and i == 0: {DIE}
""",
        coordinator_port=ports.free(),
        max_restarts=5,
        grace=0.3,
    )
    assert status == 0, err
    assert len(re.findall("process . of 2 devices 1 of 2 right", out)) == 4
    assert said(err) == [
        "restart 1 of 5: process 0 was ended by SIGKILL", "done after 1 restart",
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


def test_each_attempt_has_a_folder_for_its_records(launch, notes):
    status, _, err = launch(
        f"""{NTH}
tell("flight-record-0.json", "[]")
if nth == 0: {DIE}""",
        processes=1,
        max_restarts=1,
    )
    assert status == 0, err
    kept = notes.rglob("flight-record-0.json")
    assert sorted(path.parent.name for path in kept) == ["attempt-0", "attempt-1"]
    # Those of the attempt that failed were compared.
    assert err.count("not a flight record of jaxcomm") == 1


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
