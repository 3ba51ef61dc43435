"""``--watch`` names who holds up programs that never import jaxcomm.

NCCL is a double that makes the calls of a profiler: see tests/diagnostics/test_ring.py.
"""

import json
import pathlib

import pytest
import waiting

from jaxcomm.diagnostics import programs
from jaxcomm.diagnostics.seen import Seen
from jaxcomm.launch import watch
from jaxcomm.launch.process import Usage

pytestmark = pytest.mark.multiprocess

CALLS = pathlib.Path(__file__).parents[1] / "diagnostics"
# A step is a sum and a gather. In the fourth, process 1 does something else.
PROGRAM = f"""
import pathlib
sys.path[:0] = {str(CALLS)!r}, {str(CALLS.parent / "support")!r}
import waiting
os.environ["WATCH_LIBRARY"] = os.environ["NCCL_PROFILER_PLUGIN"]
from nccl_calls import Nccl
nccl = Nccl(5)
context = nccl.join(i, 2)
again = os.environ["JAXCOMM_RESTART_COUNT"] != "0"
for turn in range(4):
    nccl.run(context, nccl.enqueue(context, b"AllReduce"))
    nccl.run(context, nccl.enqueue(context, b"AllGather", 1024, b"ncclInt8"))
# Nobody waits for process 1 before it is there.
there = pathlib.Path(os.environ["JAXCOMM_DUMP_DIR"], "there")
if again:
    pass
elif i == 1:
    FAULT
    there.touch()
else:
    waiting.until(there.exists, "process 1")
    handle = nccl.enqueue(context, b"AllReduce")
    nccl.run(context, handle, ends=False)
if not again:
    signal.pause()
"""
FAULTS = {
    "late": "pass",
    "skips": """
    handle = nccl.enqueue(context, b"AllGather", 1024, b"ncclInt8")
    nccl.run(context, handle, ends=False)""",
    "another shape": """
    nccl.run(context, nccl.enqueue(context, b"AllReduce", 512), ends=False)""",
    # As JAX, it does not leave before the others.
    "leaves early": """
    import atexit
    atexit.register(waiting.forever)
    there.touch()
    sys.exit(0)""",
}


def program(fault):
    return PROGRAM.replace("\n    FAULT", f"\n    {FAULTS[fault].strip()}")


# Until the launcher has told.
WAIT = """
import glob
told = os.environ["JAXCOMM_DUMP_DIR"] + "/flight-record-launcher-*"
waiting.until(lambda: glob.glob(told), "what the launcher saw")
"""
WATCH = {"platform": "cuda", "watch": True, "watch_timeout": 1.0}
WHO = "suspect: process 1 (pid "
WHAT = "last completed all-gather #8"
HOW = "process 0: all-reduce #9, which its GPU has begun and not ended"


@pytest.fixture(autouse=True)
def no_other_plugin(monkeypatch):
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN", raising=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_named_ended_and_started_again(launch, fault):
    status, _, err = launch(program(fault), max_restarts=1, grace=2.0, **WATCH)
    assert status == 0
    lines = [each for each in err.splitlines() if each.startswith("jaxcomm.launch: ")]
    first = next(each for each in lines if "suspect" in each)
    assert WHO in first
    assert "equally likely" not in first
    assert WHAT in first
    assert "process 0 waits in all-reduce #9" in first
    told = next(each for each in lines if "--watch: no progress for 1 s: " in each)
    assert HOW in told
    assert told.endswith("; stopping")
    assert any("restart 1 of 1: process 1" in each for each in lines)


def test_without_restarts_it_goes_on(launch):
    status, _, err = launch(
        program("late").replace("if not again:\n    signal.pause()\n", WAIT),
        **WATCH,
    )
    assert status == 0
    assert err.count(WHO) == 1
    assert f"{HOW}; it goes on, see --max-restarts" in err


def test_another_profiler_is_not_replaced(launch, monkeypatch):
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "other.so")
    status, _, err = launch("", processes=1, **WATCH)
    assert status == 2
    assert "NCCL_PROFILER_PLUGIN is 'other.so'. Unset it" in err


def test_variables_name_a_library_that_is_there(tmp_path):
    named = watch.variables(tmp_path)["NCCL_PROFILER_PLUGIN"]
    assert pathlib.Path(named).is_file()


# Its CPU time moves on until ``reach``.
WORKS = """
import threading
has_reached = threading.Event()
def work():
    while not has_reached.is_set():
        pass
threading.Thread(target=work, daemon=True).start()
def reach():
    tell(f"{again}-{i}")
    hear(f"{again}-{1 - i}")
    has_reached.set()
again = os.environ["JAXCOMM_RESTART_COUNT"] != "0"
"""
SOON = f"""
import os, signal, sys
sys.path.insert(0, {str(CALLS.parent / "support")!r})
import waiting
{WAIT}
os.kill(os.getppid(), signal.SIGKILL)
"""
# Without JAX: a lock stands for a collective, and nobody answers for stacks.
LOCKED = f"""
if i == 0:
    # Another process: its CPU time does not count.
    subprocess.Popen([sys.executable, "-c", {SOON!r}])
    reach()
    forever()
reach()
"""
GLOO = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",))
x = jax.jit(lambda: jnp.ones(512), out_shardings=NamedSharding(mesh, P("x")))()
total = jax.jit(jnp.sum)
total(x).block_until_ready()
reach()
if i == 1 and not again:
    forever()
print(float(total(x)))
"""
STUCK = waiting.EXPIRES_SECONDS
ON_CPUS = {"platform": "cpu", "watch": True, "watch_timeout": STUCK}


@pytest.mark.thorough
def test_on_cpus_a_collective_of_xla_is_watched_by_cpu_time(
    launch, monkeypatch, tmp_path
):
    # As on GPUs: processes write what they compile.
    monkeypatch.setenv("JAXCOMM_WATCH_DIR", str(tmp_path))
    status, out, err = launch(WORKS + GLOO, max_restarts=1, grace=1.0, **ON_CPUS)
    assert status == 0
    assert out.count("512.0") == 2
    lines = [each for each in err.splitlines() if each.startswith("jaxcomm.launch: ")]
    assert lines[0] == f"jaxcomm.launch: {watch.ON_CPUS}"
    # Both wait for a lock: whether it is that of a collective, nobody can tell.
    assert lines[1].startswith("jaxcomm.launch: cannot tell: any of processes 0, 1 ")
    for process in range(2):
        assert f"process {process} was at:" in err
        file = tmp_path / f"nccl-{process}.programs"
        pid = json.loads(file.read_text().splitlines()[0])["pid"]
        (program,) = programs.beside(file, pid)
        assert program.processes == (0, 1)
        assert " of jit_" in program.node[1].name
    assert err.count("and its CPU time stands still; its main thread waits for") == 2
    assert f"no progress for {STUCK:g} s: the CPU time of processes 0, 1" in err
    assert "restart 1 of 1: no progress" in err


ON_CPUS_FAULTS = {
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "suspect: process 1 (pid "),
    "ended": ("", "likely: process 1 (pid "),
    "loops": ("while True: pass", "cannot tell: process 1 works"),
    "locked": ("forever()", "cannot tell: any of processes 0, 1 "),
}


@pytest.mark.parametrize("fault", ON_CPUS_FAULTS)
def test_on_cpus_it_is_said_what_can_be_known(launch, fault):
    text, expected = ON_CPUS_FAULTS[fault]
    if fault == "ended":
        text = "import atexit; atexit.register(forever)"
    if fault == "loops":
        text = f"has_reached.clear()\n{text}"
    status, _, err = launch(f"{WORKS}{LOCKED}{text}", grace=1.0, **ON_CPUS)
    assert status == 137
    assert expected in err
    assert "process 0 (pid " in err
    assert err.count("no progress for") == 1


class Kernel:
    """What the kernel says of two processes, for a launcher's witness."""

    def __init__(self):
        self.cpu = {0: 5.0, 1: 5.0}

    def usages(self):
        return {n: Usage("S", cpu, 0.0, "futex_wait") for n, cpu in self.cpu.items()}

    def seen(self):
        return [Seen(process=n, pid=n, host="", state="S", call="futex_wait")
                for n in self.cpu]  # fmt: skip


def test_heartbeats_are_no_progress_and_little_work_is():
    clock, kernel = waiting.Clock(), Kernel()
    looks = watch.CpuWatch(60.0, clock.monotonic)

    def pass_by(seconds, *cpu):
        """Returns what is told meanwhile, while processes use so much CPU a second."""
        told = []
        for _ in range(seconds):
            clock.advance(1.0)
            for process, more in enumerate(cpu):
                kernel.cpu[process] += more
            if held := looks.look(kernel):
                told.append(held)
        return told

    looks.look(kernel)
    assert not pass_by(300, 0.02, 0.02)
    (held,) = pass_by(300, 0.001, 0.02)
    assert held.still == {0}
    assert held.may_go_on
    # Both, though the other began to stand still later.
    pass_by(5, 1.0, 1.0)
    pass_by(20, 0.0, 1.0)
    (held,) = pass_by(300, 0.0, 0.0)
    assert held.still == {0, 1}
    assert not held.may_go_on
    assert held.process is None
