"""The nccl backend over a stand-in for libnccl that works on host memory."""

import ctypes
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import forked
import pytest
import waiting
from fault_suite import runner

import jaxcomm
from jaxcomm.communicator.backends.nccl import library

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = pathlib.Path(__file__).with_name("program.py")
TIMEOUT = {"JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS)}


def load(path):
    """Imports a file below tests/, which is on no path."""
    path = TESTS / path
    name = "_".join(path.relative_to(TESTS).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(f"for_nccl_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandIn:
    """The stand-in's controls: see tests/doubles/nccl/controls.h."""

    def __init__(self, path):
        """Opens the file, which the backend opens too."""
        self._library = ctypes.CDLL(path)
        self._library.jaxcommFakeTrace.restype = ctypes.c_char_p
        self._library.jaxcommFakeAsyncError.argtypes = ctypes.c_int64, ctypes.c_int

    def trace(self, *names):
        """Returns the calls so far as dictionaries, of some functions or of all."""
        lines = self._library.jaxcommFakeTrace().decode().splitlines()
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if not names or call["name"] in names]

    def clear(self):
        """Forgets the calls so far."""
        self._library.jaxcommFakeClearTrace()

    def fail(self, function, result, after=0):
        """Has the next call of a function, or one after it, return a result."""
        self._library.jaxcommFakeFail(function.encode(), after, result)

    def hang(self, function, after=0):
        """Has what the next call starts, or one after it, not complete."""
        self._library.jaxcommFakeHang(function.encode(), after)

    def async_error(self, communicator, result):
        """Gives the communicator of a number an asynchronous error."""
        assert self._library.jaxcommFakeAsyncError(communicator, result) == 1

    def __getattr__(self, name):
        """Returns an exported function: one of CUDA's or NCCL's."""
        return getattr(self._library, name)


@pytest.fixture
def stand_in(stand_in_path, monkeypatch):
    """The stand-in in place of NCCL, its trace empty, in this process."""
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    monkeypatch.setenv("JAXCOMM_BACKEND", "nccl")
    monkeypatch.setattr("jaxcomm.config.BACKEND", "nccl")
    monkeypatch.setenv("JAXCOMM_TIMEOUT", str(waiting.HANG_SECONDS))
    library.load.cache_clear()
    controls = StandIn(stand_in_path)
    controls.clear()
    yield controls
    # Before the library is out of sight again.
    jaxcomm.finalize()
    library.load.cache_clear()


@pytest.fixture
def with_kernels(stand_in, monkeypatch):
    """The stand-in, with the kernels of small sums."""
    monkeypatch.setenv("JAXCOMM_FAKE_KERNELS", "1")
    return stand_in


@pytest.fixture(scope="session")
def environment(stand_in_path):
    """Variables by which other processes take the stand-in for NCCL."""
    return {"JAXCOMM_NCCL_LIBRARY": stand_in_path, "JAXCOMM_BACKEND": "nccl"}


@dataclasses.dataclass
class Done:
    """What became of a process.

    Attributes:
      returncode, stdout, stderr: as subprocess has them.
      left: its names in /dev/shm. Those of other tests come and go.
    """

    returncode: int
    stdout: str
    stderr: str
    left: list[str]


@pytest.fixture
def alone(environment):
    """Gives ``alone(code, **variables)``: a Done of a process that ran code."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAXCOMM_", "NCCL_"))
    }

    def run(code, **variables):
        with forked.Popen(
            [sys.executable, "-W", "error", PROGRAM, code],
            env=inherited | environment | TIMEOUT | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as popen:
            said, errors = waiting.ended(popen)
        ours = f"jaxcomm-{popen.pid}-"
        left = [name for name in os.listdir("/dev/shm") if name.startswith(ours)]
        return Done(popen.returncode, said, errors, left)

    return run


@pytest.fixture
def told(alone):
    """Gives ``told(code, **variables)``: what such a process gave ``tell()``."""

    def run(code, **variables):
        done = alone(code, **variables)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def hardware(stand_in_path):
    """CPU devices over the stand-in, for cases of the fault suite."""
    return runner.over_stand_in(stand_in_path)


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    """What starts the processes of cases, two ahead, as on GPUs."""
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(hardware, folder, compiled_once, ahead=2)
    yield starter
    starter.stop()


@pytest.fixture(scope="session")
def load_test():
    """Gives ``load_test(path)``: a file below tests/ as a module."""
    return load


@pytest.fixture(scope="module")
def team(environment, tmp_path_factory):
    """Two processes of two devices each, as in tests/processes, over NCCL."""
    folder = tmp_path_factory.mktemp("team")
    kernels = environment | {"JAXCOMM_FAKE_KERNELS": "1"}
    made = load("processes/conftest.py").Team(2, 2, folder, kernels)
    yield made
    if not made.broken:
        made.stop()


@pytest.fixture
def start(environment, tmp_path):
    """Gives ``start(count, devices=1)``, as in tests/faults, over NCCL."""
    with load("faults/conftest.py").starting(tmp_path) as begin:
        yield lambda count, **options: begin(count, **environment, **options)
