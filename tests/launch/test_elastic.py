"""Jobs that go on while enough of their processes live."""

import pytest

pytestmark = pytest.mark.multiprocess

# Each process comes once all have, or have ended.
PROGRAM = """
import jax
count = jax.process_count()
tell(f"pid-{i}", str(os.getpid()))
pids = [int(hear(f"pid-{k}")) for k in range(count)]
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def test_any_process_may_end_the_first_too(launch, notes):
    status, out, err = launch(
        f"""{PROGRAM}
if i == 0: {KILLED}
until(lambda: not is_running(pids[0]))
if i == 1: raise ValueError("mine")
until(lambda: not is_running(pids[1]))
print("process", i, "of", count, "goes on")
""",
        processes=3,
        elastic=True,
    )
    assert status == 0, err
    assert "process 2 of 3 goes on" in out
    # The launcher may see the second end first.
    assert "process 0 was ended by SIGKILL; " in err
    assert "process 1 ended with status 1; " in err
    assert err.count("go on") == err.count("goes on") == 1


def test_a_job_of_fewer_than_it_needs_ends_and_may_start_again(launch, notes):
    status, out, err = launch(
        f"""{PROGRAM.replace("pid-", "pid-{os.environ['JAXCOMM_RESTART_COUNT']}-")}
if os.environ["JAXCOMM_RESTART_COUNT"] == "0":
    if i > 0: {KILLED}
    forever()
print("process", i, "is done")
""",
        processes=3,
        elastic=True,
        min_processes=2,
        max_restarts=1,
    )
    assert status == 0, err
    assert out.count("is done") == 3
    assert "was ended by SIGKILL; 2 others go on" in err
    assert "was ended by SIGKILL; stopping the others" in err
    assert "done after 1 restart" in err


def test_if_a_process_dies_before_all_have_joined_the_others_join_without_it(
    launch, notes
):
    status, out, err = launch(
        f"""
if i == 1 and not os.path.exists(note("died")):
    tell("died")
    {KILLED}
{PROGRAM}
print("process", i, "of", count, "is done")
""",
        processes=3,
        elastic=True,
    )
    assert status == 0, err
    assert out.count("of 2 is done") == 2
    assert "process 1 was ended by SIGKILL before all had joined: starting again" in err


@pytest.mark.parametrize("cause", [KILLED, "raise ValueError('mine')"])
def test_too_few_that_join_are_a_failure(cause, launch):
    status, _, err = launch(
        f"if i > 0: {cause}\nimport jax\njax.devices()",
        processes=2,
        elastic=True,
        min_processes=2,
    )
    assert status == (137 if cause == KILLED else 1)
    assert "starting again" not in err


def test_a_process_that_failed_and_stays_is_ended_with_the_job(launch, notes):
    status, out, err = launch(
        f"""{PROGRAM}
import atexit
if i == 1:
    atexit.register(forever)
    tell("failed")
    raise ValueError("mine")
hear("failed")
print("process", i, "is done")
""",
        processes=2,
        elastic=True,
        grace=0.5,
    )
    assert status == 0, err
    assert "process 0 is done" in out
    assert "process 1 ended with status 1; 1 other goes on" in err
