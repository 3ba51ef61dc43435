"""F6: a loop that reads nothing for many steps finishes, whatever the number of cores.

Each test is a process of its own: how many threads XLA's CPU client has is settled when
JAX makes it. All of them may use two cores, so that the client would have few threads.
"""

import os
import sys

import forked
import jaxlib.version
import pytest

# From 0.12 on XLA begins launches in threads that programs do not need.
one_pool = pytest.mark.skipif(
    jaxlib.version.__version_info__ >= (0, 12),
    reason="jaxlib 0.12 has a pool for launches and one for programs",
)

ON_TWO_CORES = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax
"""

LOOP = r"""
import sys, threading
import jax.numpy as jnp, numpy as np

steps, threads = int(sys.argv[1]), int(sys.argv[2])
devices = len(jax.devices())
mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P())
def step(w, x):
    w = w + jaxcomm.pmean(jnp.mean(x), "i")
    return w - jaxcomm.pmean(w * jnp.mean(x), "i") / 2


def run():
    w = jnp.float32(0)
    for _ in range(steps):
        w = step(w, x)
    results.append(float(w))  # the first read


x = np.arange(devices * 4, dtype=np.float32) / (devices * 4)
results = []
workers = [threading.Thread(target=run) for _ in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
mean, want = x.astype(np.float64).mean(), 0.0
for _ in range(steps):
    want = (want + mean) * (1 - mean / 2)
assert len(results) == threads, results
np.testing.assert_allclose(results, want, rtol=1e-5)
"""

# Rank 1 comes when the others have stopped waiting.
LATE_RANK = r"""
import time
import numpy as np

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def wait(i):
    if int(i) == 1:
        while not has_failed():
            time.sleep(0.005)
        # Of several errors JAX shows the first: not this rank's own.
        time.sleep(1)
    return np.float32(0)


def has_failed():
    return any(entry.state == "failed"
               for communicator in jaxcomm.flight_record().process.communicators
               for entry in communicator.entries)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False)
def program(x):
    late = jax.pure_callback(
        wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("i")
    )
    return jaxcomm.psum(x + late, "i")


try:
    jax.block_until_ready(program(np.arange(4.0, dtype=np.float32)))
except jax.errors.JaxRuntimeError as error:
    print("RAISED:", error)
"""

CLIENT_FIRST = "jax.devices()\nimport jaxcomm\n"
JAXCOMM_FIRST = "import jaxcomm\njax.devices()\n"


def run(program, *arguments, **environment):
    """Runs a program on two cores and returns what it printed to both streams."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NPROC", "PJRT_NPROC") and not name.startswith("JAXCOMM_")
    }
    flags = {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"], "JAX_PLATFORMS": "cpu"}
    done = forked.run(
        [sys.executable, "-c", ON_TWO_CORES + program, *map(str, arguments)],
        env=inherited | flags | environment,
        text=True,
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_loop_that_reads_nothing_finishes(devices):
    run(
        JAXCOMM_FIRST + LOOP,
        *(1000, 1),
        JAX_NUM_CPU_DEVICES=str(devices),
        JAXCOMM_TIMEOUT="60",
    )


def test_loops_of_three_python_threads_do_with_four_threads_a_device():
    run(
        JAXCOMM_FIRST + LOOP,
        *(300, 3),
        JAX_NUM_CPU_DEVICES="4",
        JAXCOMM_TIMEOUT="60",
        PJRT_NPROC="16",
    )


def test_the_devices_may_be_asked_for_after_the_import():
    update = "import jaxcomm\njax.config.update('jax_num_cpu_devices', 8)\n"
    run(update + LOOP, 200, 1, JAXCOMM_TIMEOUT="60")


def test_the_devices_may_be_asked_for_by_a_flag():
    flags = os.environ["QUICK_XLA_FLAGS"]
    flags += " --xla_force_host_platform_device_count=8"
    run(JAXCOMM_FIRST + LOOP, 200, 1, XLA_FLAGS=flags, JAXCOMM_TIMEOUT="60")


def test_a_client_that_is_made_anew_has_enough_threads_too():
    anew = "import jax.extend\njax.extend.backend.clear_backends()\n"
    run(
        JAXCOMM_FIRST + anew + LOOP,
        *(200, 1),
        JAX_NUM_CPU_DEVICES="8",
        JAXCOMM_TIMEOUT="60",
    )


# One of XLA's two pools of this size names its threads so that they can be counted.
COUNT = """
from collections import Counter
jax.devices()
folder = "/proc/self/task"
names = [open(f"{folder}/{task}/comm").read() for task in os.listdir(folder)]
print("threads:", sum(name.startswith("tf_XLAEigen") for name in names),
      "left:", os.environ.get("PJRT_NPROC"))
"""


@one_pool
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JAX_NUM_CPU_DEVICES": "8"}, "threads: 16 left: None"),
        ({"JAX_NUM_CPU_DEVICES": "1"}, "threads: 2 left: None"),
        ({"JAX_NUM_CPU_DEVICES": "4", "NPROC": "5"}, "threads: 8 left: None"),
        ({"JAX_NUM_CPU_DEVICES": "4", "NPROC": "20"}, "threads: 20 left: None"),
        ({"JAX_NUM_CPU_DEVICES": "4", "PJRT_NPROC": "7"}, "threads: 7 left: 7"),
    ],
)
def test_how_many_threads_there_are(environment, said):
    """What the user set holds, and processes that this one starts get none of ours."""
    assert said in run("import jaxcomm\n" + COUNT, **environment)


@one_pool
def test_who_imports_too_late_is_told_what_to_do():
    output = run(CLIENT_FIRST + LATE_RANK, JAX_NUM_CPU_DEVICES="4", JAXCOMM_TIMEOUT="2")
    notice, raised = output.index("still waiting: psum(float32["), "RAISED:"
    cause = "XLA's CPU client has 4 threads for 4 devices."
    remedy = (
        "Import jaxcomm before JAX's first use of a device, or start the process with "
        "PJRT_NPROC=8."
    )
    for text in (output[notice:], output[output.index(raised) :]):
        line = text.splitlines()[0]
        assert f"{cause} Launches" in line, output
        assert line.endswith(remedy), output
    assert output.count("still waiting") == 1, output


@one_pool
def test_who_chose_too_few_threads_is_told_which_number_would_do():
    output = run(
        JAXCOMM_FIRST + LATE_RANK,
        JAX_NUM_CPU_DEVICES="4",
        JAXCOMM_TIMEOUT="2",
        PJRT_NPROC="6",
    )
    raised = output[output.index("RAISED:") :]
    assert "has 6 threads for 4 devices." in raised
    assert "Set PJRT_NPROC=8 or more, or unset it." in raised


def test_with_enough_threads_a_late_rank_has_another_reason():
    output = run(
        JAXCOMM_FIRST + LATE_RANK, JAX_NUM_CPU_DEVICES="4", JAXCOMM_TIMEOUT="2"
    )
    assert "RAISED:" in output
    assert "PJRT_NPROC" not in output
    assert "still waiting" not in output


@one_pool
def test_several_threads_are_told_how_many_may_launch():
    elsewhere = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    output = run(
        JAXCOMM_FIRST + elsewhere + LATE_RANK,
        JAX_NUM_CPU_DEVICES="4",
        JAXCOMM_TIMEOUT="2",
    )
    raised = output[output.index("RAISED:") :]
    assert (
        "that is enough for k up to 1. Start the process with PJRT_NPROC=(k +" in raised
    )
