"""``--watch`` names who holds up programs that never import jaxcomm.

NCCL is a double that makes the calls of a profiler: see tests/diagnostics/test_ring.py.
"""

import pathlib

import pytest

from jaxcomm.launch import watch

pytestmark = pytest.mark.multiprocess

CALLS = pathlib.Path(__file__).parents[1] / "diagnostics"
# Process 1 enqueues all but the last.
PROGRAM = f"""
import pathlib
sys.path[:0] = {str(CALLS)!r}, {str(CALLS.parent / "support")!r}
import waiting
os.environ["WATCH_LIBRARY"] = os.environ["NCCL_PROFILER_PLUGIN"]
from nccl_calls import Nccl
nccl = Nccl(5)
context = nccl.join(i, 2)
again = os.environ["JAXCOMM_RESTART_COUNT"] != "0"
for turn in range(3):
    nccl.run(context, nccl.enqueue(context, b"AllReduce"))
# Nobody waits for process 1 before it is there.
there = pathlib.Path(os.environ["JAXCOMM_DUMP_DIR"], "there")
if i == 1:
    there.touch()
elif not again:
    waiting.until(there.exists, "process 1")
    handle = nccl.enqueue(context, b"AllReduce")
    nccl.run(context, handle, ends=False)
if not again:
    signal.pause()
"""
# Until the launcher has told.
WAIT = """
import glob
told = os.environ["JAXCOMM_DUMP_DIR"] + "/flight-record-launcher-*"
waiting.until(lambda: glob.glob(told), "what the launcher saw")
"""
WHO = "suspect: process 1 (pid "
WHAT = "last completed all-reduce #3"
HOW = "process 0: all-reduce #4, which its GPU has begun and not ended"


@pytest.fixture(autouse=True)
def no_other_plugin(monkeypatch):
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN", raising=False)


def test_it_is_named_ended_and_started_again(launch):
    status, _, err = launch(PROGRAM, max_restarts=1, watch=True, watch_timeout=1.0)
    assert status == 0
    lines = [each for each in err.splitlines() if each.startswith("jaxcomm.launch: ")]
    first = next(each for each in lines if "suspect" in each)
    assert WHO in first
    assert WHAT in first
    assert f"jaxcomm.launch: --watch: no progress for 1 s: {HOW}; stopping" in lines
    assert any("restart 1 of 1: process 1" in each for each in lines)


def test_without_restarts_it_goes_on(launch):
    status, _, err = launch(
        PROGRAM.replace("if not again:\n    signal.pause()\n", WAIT),
        watch=True,
        watch_timeout=1.0,
    )
    assert status == 0
    assert err.count(WHO) == 1
    assert f"{HOW}; it goes on, see --max-restarts" in err


def test_another_profiler_is_not_replaced(launch, monkeypatch):
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "other.so")
    status, _, err = launch("", processes=1, watch=True)
    assert status == 2
    assert "NCCL_PROFILER_PLUGIN is 'other.so'. Unset it" in err


def test_variables_name_a_library_that_is_there(tmp_path):
    named = watch.variables(tmp_path)["NCCL_PROFILER_PLUGIN"]
    assert pathlib.Path(named).is_file()
