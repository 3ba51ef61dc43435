"""Processes that end without finalize, or are told to end while NCCL hangs."""

import signal

import pytest
import waiting

START = f"""
SOON = {waiting.EXPIRES_SECONDS}
mesh = mesh_of(2)
jaxcomm.init(mesh, lanes=("default", "other"))
program = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = jnp.arange(2.0)
jax.block_until_ready(program(x))
"""

# What the program does last. Its status is 0 but after an exception.
ENDINGS = {
    "without finalize": "",
    "after an exception": "class Mine(BaseException): pass\nraise Mine('own')",
    # It has as long to end.
    "with an operation that hangs": """

def made():
    # A process that is stopped meanwhile is late for that as well: then once more.
    jaxcomm.finalize()
    try:
        return jaxcomm.init(mesh, lanes=("default", "other"), timeout=SOON)
    except jaxcomm.CommunicatorError:
        return None

waiting.until(made)
stand_in.hang("ncclAllReduce")
out = program(x)
""",
    "after an operation that failed": """
stand_in.fail("ncclAllReduce", 3)
assert "ncclAllReduce" in error_of(lambda: program(x))
""",
    "after a creation that failed": """
stand_in.fail("ncclCommSplit", 3)
assert "ncclCommSplit" in error_of(lambda: jaxcomm.init(mesh_of(3)))
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_its_own_status(alone, ending):
    done = alone(START + ENDINGS[ending])
    said, raises = done.said(), "exception" in ending
    assert done.popen.returncode == int(raises), said[-3000:]
    assert ("Mine: own" in said) == raises
    # Of code that raised.
    assert all("raised" not in message for message in done.heard), done.heard
    if not raises and "hangs" not in ending:
        # There JAX reports the operation that the end cut short.
        assert "Traceback" not in said
    assert "terminate called" not in said
    assert "leaked" not in said  # nanobind's own report


@pytest.mark.parametrize(
    "function", ["ncclCommInitRankConfig", "ncclCommSplit", "ncclAllReduce"]
)
def test_ctrl_c_ends_a_creation_that_hangs(start, function):
    processes = start(1, devices=2)
    (process,) = processes
    process.tell(
        f"""
from stand_in import StandIn
stand_in = StandIn()
stand_in.hang({function!r}, 1)
say_when(lambda: len(stand_in.trace({function!r})) >= 2)
try:
    jaxcomm.init(mesh_of())
except KeyboardInterrupt:
    answer = "interrupted"
"""
    )
    assert process.hear() == "now"
    process.popen.send_signal(signal.SIGINT)
    # The timeout would be another exception.
    assert process.hear() == "interrupted"
    process.ask("jaxcomm.init(mesh_of())")
    processes.end()
