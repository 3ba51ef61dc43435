"""Processes that end without finalize, or are told to end while NCCL hangs."""

import os
import signal
import subprocess
import sys

import pytest
import waiting

START = """
mesh = mesh_of(2)
jaxcomm.init(mesh, lanes=("default", "other"))
program = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = jnp.arange(2.0)
jax.block_until_ready(program(x))
"""

ENDINGS = {
    "without finalize": ("", 0, ""),
    "with work in flight": ("outs = [program(x) for _ in range(50)]", 0, ""),
    "after an exception": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "with an operation that hangs": (
        # It has as long to end.
        "jaxcomm.finalize()\n"
        "impatient.init(mesh, lanes=('default', 'other'))\n"
        "stand_in.jaxcommFakeHang(b'ncclAllReduce', 0); out = program(x)",
        0,
        "",
    ),
    "after an operation that failed": (
        "stand_in.jaxcommFakeFail(b'ncclAllReduce', 0, 3)\n"
        "assert 'ncclAllReduce' in error_of(lambda: program(x))",
        0,
        "",
    ),
    "after a creation that failed": (
        "stand_in.jaxcommFakeFail(b'ncclCommSplit', 0, 3)\n"
        "assert 'ncclCommSplit' in error_of(lambda: jaxcomm.init(mesh_of(3)))",
        0,
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_its_own_status(alone, ending):
    code, status, message = ENDINGS[ending]
    done = alone(START + code)
    assert done.returncode == status, done.stderr[-3000:]
    assert message in done.stderr
    if status == 0 and "hangs" not in ending:
        # There JAX reports the operation that the end cut short.
        assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr
    assert "leaked" not in done.stderr  # nanobind's own report
    assert done.left == []


# What hangs, and how many calls of it there are then.
HANGING = {"ncclCommInitRankConfig": 2, "ncclCommSplit": 2, "ncclAllReduce": 2}
CREATE = """
function, calls = {function!r}, {calls}
stand_in.jaxcommFakeHang(function.encode(), 1)

def watch():
    until_called(function, calls)
    tell("hangs")

threading.Thread(target=watch).start()
try:
    jaxcomm.init(mesh_of(2))
except KeyboardInterrupt:
    tell("interrupted")
jaxcomm.init(mesh_of(2))
tell("made")
"""


@pytest.mark.parametrize("function", HANGING)
def test_ctrl_c_ends_a_creation_that_hangs(start_program, function):
    code = CREATE.format(function=function, calls=HANGING[function])
    process = start_program(code)
    assert process.stdout.readline() == '"hangs"\n'
    process.send_signal(signal.SIGINT)
    # The timeout would be another exception.
    said, errors = waiting.ended(process)
    assert said == '"interrupted"\n"made"\n', errors[-3000:]
    assert process.returncode == 0


@pytest.fixture
def start_program(environment):
    """Gives ``start_program(code)``: a process that runs it, ended after the test."""
    processes = []
    program = os.path.join(os.path.dirname(__file__), "program.py")

    def start(code):
        process = subprocess.Popen(
            [sys.executable, program, code],
            env=os.environ
            | environment
            | {"JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
