"""Failures that cost a process its GPUs, or its life: each in one of its own.

The fault suite has the rest: test_faults.py.
"""

import pytest

ENDED = 70
START = """
policy = jaxcomm.CommPolicy(on_failure={policy!r})
mesh = mesh_of(3)
jaxcomm.init(mesh, policy=policy)
program = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = jnp.arange(6.0)
kept = np.asarray(program(x))
assert kept.tolist() == [6, 9] * 3

def run():
    return program(x)

"""
# What makes the next run of the program fail, and what is to be said of it.
HANGS = """
stand_in.clear()
stand_in.hang("ncclAllReduce")
"""
FAULTS = {
    "error": (
        f"""{HANGS}
def give_error():
    stand_in.until_called("ncclAllReduce", 3)
    # Not of the last call, which may still be made.
    stand_in.async_error(stand_in.trace("ncclAllReduce")[0])

threading.Thread(target=give_error).start()
""",
        "An asynchronous error that a test asked for",
    ),
    "closed": (
        f"""
jaxcomm.finalize()
# Closing waits as long for what is on its way.
impatient.init(mesh, policy=policy)
{HANGS}
def close():
    stand_in.until_called("ncclAllReduce", 3)
    jaxcomm.communicators()[0].close()

threading.Thread(target=close).start()
""",
        # The timeout of the operation, or of the closing.
        "",
    ),
}
NAMED = "psum(float32[2]) over axes ('i',) (lane 'default'"
STOPPED = (
    "the GPUs of this process are stopped, because a collective failed: psum(float32"
)
AFTER = """
answer = {
    "first": error_of(run),
    "next": error_of(run),
    "first failure": jaxcomm._ffi.first_failure(),
    "init of what is live": error_of(lambda: len(jaxcomm.init(mesh, policy=policy))),
    "init": error_of(lambda: len(jaxcomm.init(mesh, lanes="other", policy=policy))),
    "finalize": error_of(jaxcomm.finalize),
    "init again": error_of(lambda: len(jaxcomm.init(mesh, policy=policy))),
    "anew": error_of(run),
    "live": jaxcomm.counters().live,
    "kept": kept.tolist(),
}
"""


@pytest.fixture
def told_by(alone, tmp_path):
    """Gives ``told_by(policy, fault, after)``: what became of a process."""

    def run(policy, fault, after):
        code = START.format(policy=policy) + FAULTS[fault][0] + after
        done = alone(code, JAXCOMM_DUMP_DIR=str(tmp_path))
        record = tmp_path / "flight-record-0.json"
        assert "psum" in record.read_text()
        assert str(record) in done.said()
        return done

    return run


def said(done):
    """Returns the line that says what failed."""
    lines = [line for line in done.said().splitlines() if NAMED in line]
    assert len(lines) == 1, done.said()[-3000:]
    assert lines[0].startswith("jaxcomm: ")
    return lines[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_by_default_all_that_uses_the_gpus_raises(told_by, fault):
    """Where all ranks are in one process."""
    cause = FAULTS[fault][1]
    done = told_by(None, fault, AFTER)
    assert done.popen.returncode == 0, done.said()[-3000:]
    line = said(done)
    assert cause in line
    assert " rank " in line
    assert "the GPUs of this process were stopped" in line
    told = done.hear()
    # What was on the host stays.
    assert told["kept"] == [6, 9] * 3
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


def test_the_process_ends(told_by):
    after = "\nerror_of(run)\nwaiting.forever()"
    done = told_by("exit", "closed", after)
    assert done.popen.returncode == ENDED, done.said()[-3000:]
    assert said(done).endswith(". The process ends")
