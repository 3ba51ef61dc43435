"""Failures that cost a process its GPUs, or its life: each in one of its own."""

import json

import pytest

# The start of a process on a machine with more to do included.
PATIENCE_SECONDS = 60
ENDED = 70

START = """
policy = jaxcomm.CommPolicy(on_failure={policy!r})
mesh = mesh_of(3)
jaxcomm.init(mesh, policy=policy)
program = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = jnp.arange(6.0)
kept = np.asarray(program(x))
assert kept.tolist() == [6, 9] * 3
timeout = {timeout}
if timeout is not None:
    # Of what hangs from now on. What is to succeed takes the time it takes.
    jaxcomm.finalize()
    jaxcomm.init(mesh, policy=policy, timeout=timeout)

def run():
    return program(x)

"""
# The deadline is what is met, or what closing waits for.
TIMEOUTS = {"hangs": 2, "closed": 2}
# What makes the next run of the program fail, and what is to be said of it.
FAULTS = {
    "hangs": ("stand_in.jaxcommFakeHang(b'ncclAllReduce', 0)", "not done after 2 s"),
    "refused": (
        # Where one rank has begun.
        "stand_in.jaxcommFakeFail(b'ncclAllReduce', 1, 3)",
        "ncclAllReduce: internal error",
    ),
    "error": (
        """
stand_in.jaxcommFakeHang(b'ncclAllReduce', 0)
before = len(trace("ncclAllReduce"))

def give_error():
    while len(trace("ncclAllReduce")) < before + 3:
        time.sleep(0.001)
    # Not of the last call, which may still be made.
    number = trace("ncclAllReduce")[before]["comm"]
    stand_in.jaxcommFakeAsyncError(ctypes.c_int64(number), 6)

giver = threading.Thread(target=give_error)
giver.start()
""",
        "An asynchronous error that a test asked for",
    ),
    "closed": (
        """
stand_in.jaxcommFakeHang(b'ncclAllReduce', 0)
before = len(trace("ncclAllReduce"))

def close():
    while len(trace("ncclAllReduce")) < before + 3:
        time.sleep(0.001)
    # The watch sees that the operation runs: it has its deadline before the closing.
    time.sleep(1)
    jaxcomm.communicators()[0].close()

closer = threading.Thread(target=close)
closer.start()
""",
        # The deadline, which is also what closing waits for, or the closing.
        "",
    ),
}
NAMED = "psum(float32[2]) over axes ('i',) (lane 'default'"
STOPPED = (
    "the GPUs of this process are stopped, because a collective failed: psum(float32"
)
AFTER = """
begin = time.monotonic()
first = error_of(run)
seconds = time.monotonic() - begin
tell({
    "first": first,
    "seconds": seconds,
    "next": error_of(run),
    "first failure": jaxcomm._ffi.first_failure(),
    "init of what is live": error_of(lambda: len(jaxcomm.init(mesh, policy=policy))),
    "init": error_of(lambda: len(jaxcomm.init(mesh, lanes="other", policy=policy))),
    "finalize": error_of(jaxcomm.finalize),
    "init again": error_of(lambda: len(jaxcomm.init(mesh, policy=policy))),
    "anew": error_of(run),
    "live": jaxcomm.counters().live,
    "kept": kept.tolist(),
})
"""


@pytest.fixture
def told_by(alone, tmp_path):
    """Gives ``told_by(policy, fault, after)``: what became of a process."""

    def run(policy, fault, after):
        start = START.format(policy=policy, timeout=TIMEOUTS.get(fault))
        code = start + FAULTS[fault][0] + after
        done = alone(code, JAXCOMM_DUMP_DIR=str(tmp_path))
        assert done.left == []
        # A call that NCCL refuses is known by its error alone.
        records = policy == "exit" or fault != "refused"
        if records:
            record = tmp_path / "flight-record-0.json"
            assert "psum" in record.read_text()
            assert str(record) in done.stderr
        return done

    return run


def said(done):
    """Returns the line that says what failed."""
    lines = [line for line in done.stderr.splitlines() if NAMED in line]
    assert len(lines) == 1, done.stderr[-3000:]
    assert lines[0].startswith("jaxcomm: ")
    return lines[0]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", ["raise", None])
def test_all_that_uses_the_gpus_raises(told_by, fault, policy):
    """By default too, where all ranks are in one process."""
    cause = FAULTS[fault][1]
    done = told_by(policy, fault, AFTER)
    assert done.returncode == 0, done.stderr[-3000:]
    line = said(done)
    assert cause in line
    assert " rank " in line
    assert "the GPUs of this process were stopped" in line
    told = json.loads(done.stdout.splitlines()[-1])
    # What was on the host stays.
    assert told["kept"] == [6, 9] * 3
    assert told["seconds"] < PATIENCE_SECONDS
    # As XLA raises what CUDA gives; the rank whose own call failed says why.
    assert "CUDA error 716" in told["first"] or cause in told["first"], told
    assert told["next"].startswith("JaxRuntimeError"), told
    for later in ("init of what is live", "init", "init again"):
        assert told[later].startswith(f"CommunicatorError: {STOPPED}"), told
        assert cause in told[later]
    assert told["finalize"] == ""
    assert told["anew"] != ""
    assert told["live"] == 0
    assert cause in told["first failure"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_process_ends(told_by, fault):
    cause = FAULTS[fault][1]
    done = told_by("exit", fault, "\nerror_of(run)\ntime.sleep(60)\ntell('it went on')")
    assert done.returncode == ENDED, done.stderr[-3000:]
    line = said(done)
    assert cause in line
    assert line.endswith(". The process ends")
    assert "it went on" not in done.stdout
