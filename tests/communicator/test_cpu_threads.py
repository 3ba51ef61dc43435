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
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax
"""

LOOP = r"""
import jax.numpy as jnp, numpy as np
devices = len(jax.devices())
mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P())
def step(w, x):
    w = w + jaxcomm.pmean(jnp.mean(x), "i")
    return w - jaxcomm.pmean(w * jnp.mean(x), "i") / 2


x, w = np.arange(devices * 4, dtype=np.float32) / (devices * 4), jnp.float32(0)
for _ in range(300):
    w = step(w, x)
mean, want = x.astype(np.float64).mean(), 0.0
for _ in range(300):
    want = (want + mean) * (1 - mean / 2)
np.testing.assert_allclose(float(w), want, rtol=1e-5)  # the first read
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

# One of XLA's two pools of this size names its threads so that they can be counted.
COUNT = """
jax.devices()
folder = "/proc/self/task"
names = [open(f"{folder}/{task}/comm").read() for task in os.listdir(folder)]
print("threads:", sum(name.startswith("tf_XLAEigen") for name in names),
      "left:", os.environ.get("PJRT_NPROC"))
"""

IMPORTED = "import jaxcomm, threading\n"
STARTED = "jax.devices()\n"
UPDATE = "jax.config.update('jax_num_cpu_devices', 8)\n"
# As each notebook has.
IDLE = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
COMPILES = """
def compile():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    psum = jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                         in_specs=jax.P("i"), out_specs=jax.P())
    jax.jit(psum).lower(jax.numpy.ones(4))
thread = threading.Thread(target=compile)
thread.start()
thread.join()
"""
FLAG = {
    "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]
    + " --xla_force_host_platform_device_count=8"
}
EIGHT = {"JAX_NUM_CPU_DEVICES": "8"}


def run(program, **environment):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NPROC", "PJRT_NPROC") and not name.startswith("JAXCOMM_")
    }
    flags = {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"], "JAX_PLATFORMS": "cpu"}
    done = forked.run(
        [sys.executable, "-c", ON_TWO_CORES + program],
        env=inherited | flags | environment,
        text=True,
        capture_output=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_loop_that_reads_nothing_finishes():
    run(IMPORTED + STARTED + LOOP, **EIGHT)


@one_pool
@pytest.mark.parametrize(
    ("begin", "environment", "said"),
    [
        ("", EIGHT, "threads: 16 left: None"),
        ("", FLAG, "threads: 16 left: None"),
        (UPDATE, {}, "threads: 16 left: None"),
        ("", {"JAX_NUM_CPU_DEVICES": "1"}, "threads: 2 left: None"),
        (UPDATE, {"PJRT_NPROC": "9"}, "threads: 9 left: 9"),
    ],
)
def test_how_many_threads_there_are(begin, environment, said):
    """What the user set holds, and processes that this one starts get none of ours."""
    assert said in run(IMPORTED + begin + COUNT, **environment)


@pytest.mark.parametrize(
    ("begin", "environment", "said"),
    [
        pytest.param(
            *(STARTED + IMPORTED, {}),
            "XLA's CPU client has 4 threads for 4 devices. Launches|Import jaxcomm "
            "before JAX's first use of a device, or start the process with "
            "PJRT_NPROC=8.\n",
            marks=one_pool,
        ),
        pytest.param(
            *(IMPORTED + STARTED + COMPILES, {}),
            "that is enough for k up to 1. Start the process with PJRT_NPROC=(k +",
            marks=one_pool,
        ),
        (IMPORTED + STARTED + IDLE, {}, ""),
    ],
    ids=["imported late", "several Python threads", "enough"],
)
def test_who_waits_for_want_of_threads_is_told_how_many_would_do(
    begin, environment, said
):
    output = run(
        begin + MISSING_RANK,
        JAX_NUM_CPU_DEVICES="4",
        JAXCOMM_TIMEOUT=str(waiting.EXPIRES_SECONDS),
        **environment,
    )
    assert output.count("still waiting: psum(float32[") == bool(said), output
    assert said or "PJRT_NPROC" not in output
    assert not said or "rank 1 of 4 has not come for 1 s. XLA's CPU client" in output
    for which in ("RAISED:", "still waiting:") if said else ():
        line = output[output.index(which) :].partition("\n")[0]
        for part in said.split("|"):
            assert part in line + "\n"
