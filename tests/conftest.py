"""Eight virtual CPU devices for every test, and nothing left behind by any."""

import dataclasses
import gc
import importlib.metadata
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

# Compiling takes most of the tests' time, and what is compiled runs once: it need not
# be fast. In one part: of programs this small, parts for several threads cost a third
# more. For the processes that tests start, too. jaxlib 0.12 does without the last flag,
# and ends a process over one it does not know.
# XLA ends a process whose devices do not meet in 40 s. On a busy machine they may not.
os.environ["QUICK_XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_collective_call_terminate_timeout_seconds=200"
) + (
    " --xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    else ""
)
# Before the first import of jax: the devices are counted when its client starts. Of two
# flags of a name the later one holds: the user's own, the number of devices excepted.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ["QUICK_XLA_FLAGS"],
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where a process that a test starts crashes, its errors say where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# A script's background job ignores Ctrl-C, and so would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import forked
import jax
import models
import pytest
import waiting
from stand_in import StandIn

import jaxcomm
from jaxcomm.communicator.backends.nccl import library

# Users turn on what JAX has of strictness. It must find nothing in what we trace.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Not by JAX's own variables: processes that tests start are killed, and would leave
# parts of files.
if _CACHE := os.environ.get("JAXCOMM_TEST_CACHE"):
    jax.config.update("jax_compilation_cache_dir", _CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Processes that tests start import the jaxcomm under test: the tree or the installed
# one. They also find what the tests import beside it.
_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = "benchmarks", "examples", "tests", "tests/support"
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(
        [
            str(pathlib.Path(jaxcomm.__file__).parents[1]),
            *(str(_ROOT / each) for each in _FOLDERS),
            *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        ]
    )
)


def pytest_addoption(parser):
    parser.addoption(
        "--one-of-each",
        action="store_true",
        help="run one test of each file, one of each folder that starts several "
        "processes, and none that is slow (`make check`)",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run what is marked thorough too (`make test-all`); a test that is named "
        "with :: runs without it",
    )


def pytest_collection_modifyitems(config, items):
    named = any("::" in each for each in config.args)
    if not named and not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if not config.getoption("--one-of-each"):
        return
    first_of = {}
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "notebook"))):
            continue
        # Processes take long to start: one such test of a folder will do.
        starts = item.get_closest_marker("multiprocess")
        first_of.setdefault(item.path.parent if starts else item.path, item)
    chosen = set(first_of.values())
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish():
    """Has Python look for garbage among what tests make, and less often.

    What jax traces are many small objects that live on: a tenth of the time went into
    looking through them, and through the modules. Who looks for a leak asks by itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory):
    """Has what processes leave in the temporary folder on purpose end up in pytest's.

    Of a job that failed the launcher keeps the flight records there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory):
    """Variables by which a process need not compile what one before it has."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(autouse=True)
def fresh_communicators():
    """Starts and ends each test without communicators, compiled programs or choices."""
    jaxcomm.finalize()
    yield
    jaxcomm.finalize()


@pytest.fixture(scope="session")
def as_users_compile():
    """Options for ``lowered.compile()``, where a test looks at what XLA has made.

    Buffers and order are settled before LLVM, whose optimization stays off.
    """
    of_users = {"xla_cpu_use_fusion_emitters": True}
    quick = os.environ["QUICK_XLA_FLAGS"]
    return {name: value for name, value in of_users.items() if f"--{name}=" in quick}


@pytest.fixture(scope="session")
def stand_in_path():
    path = os.environ.get("JAXCOMM_TEST_FAKE_NCCL")
    if not path:
        pytest.skip(
            "JAXCOMM_TEST_FAKE_NCCL does not name libjaxcomm_fake_nccl.so, which "
            "`make cpptest` builds and `make test` names"
        )
    return path


@pytest.fixture
def stand_in(stand_in_path, monkeypatch):
    """The stand-in in place of NCCL, its trace empty, in this process."""
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", stand_in_path)
    monkeypatch.setenv("JAXCOMM_BACKEND", "nccl")
    monkeypatch.setattr("jaxcomm.config.BACKEND", "nccl")
    monkeypatch.setenv("JAXCOMM_TIMEOUT", str(waiting.HANG_SECONDS))
    library.load.cache_clear()
    controls = StandIn()
    controls.clear()
    yield controls
    # Before the library is out of sight again.
    jaxcomm.finalize()
    library.load.cache_clear()
    assert controls.misuse() == ""


@pytest.fixture
def with_kernels(stand_in, monkeypatch):
    """The stand-in, with the kernels of small sums."""
    monkeypatch.setenv("JAXCOMM_FAKE_KERNELS", "1")
    return stand_in


@pytest.fixture
def make_mesh():
    def make(**axes):
        shape, auto = tuple(axes.values()), (jax.sharding.AxisType.Auto,) * len(axes)
        devices = jax.devices()[: math.prod(shape)]
        return jax.make_mesh(shape, tuple(axes), auto, devices=devices)

    return make


@pytest.fixture
def psum_over():
    def build(mesh, axes="i", **options):
        return models.over(mesh, lambda x: jaxcomm.psum(x, axes, **options))

    return build


@pytest.fixture
def piped():
    """Starts Pythons whose ends of pipes the test holds; kills them at its end."""
    started = []

    def start(words, kind=forked.Popen, **options):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = [sys.executable, *words]
        started.append(kind(words, text=True, **pipes, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def counted():
    before = dataclasses.asdict(jaxcomm.communicators().counters)

    def since():
        now = dataclasses.asdict(jaxcomm.communicators().counters)
        change = {name: now[name] - before[name] for name in now}
        return {name: count for name, count in change.items() if count}

    return since
