"""F6: a loop that reads nothing for many steps finishes, whatever the number of cores.

Each test is a process of its own: how many threads XLA's CPU client has is settled when
JAX makes it. All of them may use two cores, so that the client would have few threads.
"""

import os
import sys

import forked
import jaxlib.version
import pytest
import waiting

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

# Rank 1 never comes.
MISSING_RANK = """
import numpy as np

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False)
def program(x):
    is_missing = jax.lax.axis_index("i") == 1
    return jax.lax.cond(is_missing, lambda x: x, lambda x: jaxcomm.psum(x, "i"), x)


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
        timeout=waiting.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


UPDATE = "import jaxcomm\njax.config.update('jax_num_cpu_devices', 8)\n"
ANEW = "import jax.extend\njax.extend.backend.clear_backends()\n"
FLAG = {
    "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]
    + " --xla_force_host_platform_device_count=8"
}
EIGHT = {"JAX_NUM_CPU_DEVICES": "8"}


# That there are enough threads is counted below, in less time.
@pytest.mark.parametrize(
    ("begin", "steps", "threads", "environment"),
    [
        (JAXCOMM_FIRST, 300, 1, EIGHT),
        pytest.param(
            *(JAXCOMM_FIRST, 300, 3, {"JAX_NUM_CPU_DEVICES": "4", "PJRT_NPROC": "16"}),
            marks=pytest.mark.thorough,
        ),
        pytest.param(UPDATE, 300, 1, {}, marks=pytest.mark.thorough),
        pytest.param(JAXCOMM_FIRST, 300, 1, FLAG, marks=pytest.mark.thorough),
        pytest.param(JAXCOMM_FIRST + ANEW, 300, 1, EIGHT, marks=pytest.mark.thorough),
    ],
    ids=["by a variable", "three Python threads", "by a call", "by a flag", "anew"],
)
def test_a_loop_that_reads_nothing_finishes(begin, steps, threads, environment):
    run(begin + LOOP, steps, threads, **environment)


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
    ("begin", "environment", "said"),
    [
        ("import jaxcomm\n", EIGHT, "threads: 16 left: None"),
        ("import jaxcomm\n", FLAG, "threads: 16 left: None"),
        (UPDATE, {}, "threads: 16 left: None"),
        ("import jaxcomm\n", {"JAX_NUM_CPU_DEVICES": "1"}, "threads: 2 left: None"),
        pytest.param(
            *(UPDATE, {"NPROC": "20"}, "threads: 20 left: None"),
            marks=pytest.mark.thorough,
        ),
        (UPDATE, {"PJRT_NPROC": "9"}, "threads: 9 left: 9"),
    ],
)
def test_how_many_threads_there_are(begin, environment, said):
    """What the user set holds, and processes that this one starts get none of ours."""
    assert said in run(begin + COUNT, **environment)


def missing_rank(begin, **environment):
    """Returns what a program prints, all of it and from its exception on."""
    output = run(
        begin + MISSING_RANK,
        JAX_NUM_CPU_DEVICES="4",
        JAXCOMM_TIMEOUT=str(waiting.EXPIRES_SECONDS),
        **environment,
    )
    return output, output[output.index("RAISED:") :]


@one_pool
def test_who_imports_too_late_is_told_what_to_do():
    output, raised = missing_rank(CLIENT_FIRST)
    notice = output[output.index("still waiting: psum(float32[") :]
    for text in (notice, raised):
        line = text.splitlines()[0]
        cause = "XLA's CPU client has 4 threads for 4 devices. Launches"
        assert cause in line, output
        assert line.endswith(
            "Import jaxcomm before JAX's first use of a device, or start the process "
            "with PJRT_NPROC=8."
        )
    assert output.count("still waiting") == 1, output


@one_pool
@pytest.mark.thorough
def test_who_chose_too_few_threads_is_told_which_number_would_do():
    _, raised = missing_rank(JAXCOMM_FIRST, PJRT_NPROC="6")
    assert "has 6 threads for 4 devices." in raised
    assert "Set PJRT_NPROC=8 or more, or unset it." in raised


def test_with_enough_threads_a_missing_rank_has_another_reason():
    output, _ = missing_rank(JAXCOMM_FIRST)
    assert "PJRT_NPROC" not in output
    assert "still waiting" not in output


@one_pool
def test_several_threads_are_told_how_many_may_launch():
    elsewhere = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    _, raised = missing_rank(JAXCOMM_FIRST + elsewhere)
    enough = "that is enough for k up to 1. Start the process with PJRT_NPROC=(k +"
    assert enough in raised
