"""The nccl backend over a stand-in for libnccl that works on host memory."""

import pytest
from fault_suite import runner
from team import Process, Team, shared_files, starting
from team import environment as variables_of


@pytest.fixture(scope="session")
def environment(stand_in_path):
    """Variables by which other processes take the stand-in for NCCL."""
    return {"JAXCOMM_NCCL_LIBRARY": stand_in_path, "JAXCOMM_BACKEND": "nccl"}


# What the code of ``alone`` and ``told`` has at hand, beside what is in worker.py.
PRELUDE = """
import jax.numpy as jnp
from stand_in import StandIn
stand_in = StandIn()

def error_of(action):
    try:
        jax.block_until_ready(action())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""


@pytest.fixture
def alone(environment, tmp_path):
    def run(code, **variables):
        process = Process(
            variables_of(8) | environment | variables,
            tmp_path / "alone.txt",
            options=("-W", "error"),
        )
        process.tell(PRELUDE + code)
        process.popen.stdin.close()
        process.ends()
        process.stop()
        assert shared_files([process.pid]) == []
        return process

    return run


@pytest.fixture
def told(alone):
    def run(code, **variables):
        process = alone(code, **variables)
        assert process.popen.returncode == 0, process.said()[-3000:]
        return process.hear()

    return run


@pytest.fixture(scope="session")
def hardware(stand_in_path):
    return runner.over_stand_in(stand_in_path)


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    """What starts the processes of cases, two ahead, as on GPUs."""
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(hardware, folder, compiled_once, ahead=2)
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def team(environment, tmp_path_factory):
    """Two processes of five devices each, over NCCL."""
    folder = tmp_path_factory.mktemp("team")
    made = Team(2, folder, devices=5, **environment, JAXCOMM_FAKE_KERNELS="1")
    yield made
    if made.broken:
        made.stop()
    else:
        made.end()


@pytest.fixture
def start(environment, tmp_path):
    with starting(tmp_path, **environment) as begin:
        yield begin
