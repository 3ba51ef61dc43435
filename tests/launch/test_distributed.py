"""One program, whoever starts its processes."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess


def expected(processes, devices):
    return [
        f"process {i} of {processes} devices {devices} of {processes * devices} right"
        for i in range(processes)
    ]


def results(out):
    """Keeps our program's lines; gloo writes some of its own to stdout."""
    return sorted(
        line.partition("process ")[1] + line.partition("process ")[2]
        for line in out.splitlines()
        if "process " in line
    )


# mpi4py need not be there: the launcher answers for the cluster, whatever is asked.
@pytest.mark.parametrize("style", ["nothing", "initialize", "mpi4py", "explicit"])
def test_the_processes_are_joined_however_the_program_asks(
    style, launch, sums_device_ids
):
    devices = 2 if style == "initialize" else 1
    status, out, err = launch(
        sums_device_ids, style, devices_per_process=devices, timeout=120
    )
    assert status == 0, err
    assert results(out) == expected(2, devices)


def test_the_program_has_its_say_before_jax_is_imported(launch):
    status, out, err = launch(
        """
assert "jax" not in sys.modules
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jaxcomm, jax
assert not jax.distributed.is_initialized()
print("process", jax.numpy.zeros(1).dtype, jax.device_count(), jax.process_count())
""",
        timeout=200,
    )
    assert status == 0, err
    assert results(out) == ["process float64 6 2"] * 2


def test_a_forked_copy_does_not_join(launch):
    status, out, err = launch(
        """
import jax
copy = os.fork()
if copy == 0:
    jax.devices()
    print("process", "joined" if jax.distributed.is_initialized() else "alone")
    os._exit(0)
os.wait()
""",
        processes=1,
        timeout=200,
    )
    assert status == 0, err
    assert results(out) == ["process alone"]


def test_a_failure_under_jax_is_told_at_once(launch):
    # JAX waits at the end of a process for the others, and takes SIGTERM for news.
    status, _, err = launch(
        """
import jax
jax.devices()
if i == 1: raise ValueError("mine")
time.sleep(1000)
""",
        grace=0.5,
        timeout=200,
    )
    assert status == 1
    assert "[1] ValueError: mine" in err
    assert "process 1 ended with status 1; stopping the others" in err


def test_by_hand(by_hand, program, sums_device_ids, free_port):
    command = [sys.executable, "-m", "jaxcomm.launch.child", program(sums_device_ids)]
    environments = [
        {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{free_port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(i),
        }
        for i in range(2)
    ]
    out = by_hand([command] * 2, environments)
    assert results("".join(out)) == expected(2, 1)


@pytest.mark.parametrize(
    ("words", "status"),
    [(["x.py"], 1), (["--help"], 0), (["--bogus=x", "x.py"], 1), (["--a=3", "b"], 1)],
)
def test_by_hand_without_a_place_says_how(words, status):
    done = subprocess.run(
        [sys.executable, "-m", "jaxcomm.launch.child", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    said = done.stderr if status else done.stdout
    assert "JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=n" in said


def test_a_place_that_is_no_number_is_named(program):
    place = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_PROCESS_ID": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxcomm.launch.child", program("import jax")],
        env=os.environ | place | {"JAX_NUM_PROCESSES": "two"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "JAX_NUM_PROCESSES='two' is no number." in done.stderr


def test_under_slurm(by_hand, program, sums_device_ids, free_port):
    """With Slurm's variables, since there is no Slurm here."""
    command = [sys.executable, program(sums_device_ids), "initialize"]
    environments = [
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
            "JAX_COORDINATOR_PORT": str(free_port),
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{free_port}",
            # Only our own preamble of the program reads it.
            "JAX_PROCESS_ID": str(i),
        }
        for i in range(2)
    ]
    out = by_hand([command] * 2, environments)
    assert results("".join(out)) == expected(2, 1)


def test_under_mpirun(by_hand, program, sums_device_ids, free_port):
    mpirun = pathlib.Path(sys.executable).with_name("mpiexec")
    if not mpirun.exists() or not importlib.util.find_spec("mpi4py"):
        pytest.skip("needs mpiexec and mpi4py: pip install mpich mpi4py")
    command = [
        mpirun, "-n", "2", sys.executable, program(sums_device_ids), "mpi4py",
    ]  # fmt: skip
    address = f"127.0.0.1:{free_port}"
    out = by_hand(
        [command],
        [
            {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                "JAX_PROCESS_ID": "0",
            }
        ],
    )
    assert results("".join(out)) == expected(2, 1)


def test_what_fails_before_the_devices_start_is_tried_again(launch):
    status, out, err = launch(
        """
import jax
from jaxcomm import compat
calls = []
def act():
    calls.append(1)
    if len(calls) == 1: raise RuntimeError("not yet")
compat.before_devices_start(act)
for _ in range(3):
    try: print("process", jax.process_count(), calls)
    except RuntimeError as error: print("process", error)
""",
        processes=1,
        timeout=200,
    )
    assert status == 0, err
    assert results(out) == ["process 1 [1, 1]", "process 1 [1, 1]", "process not yet"]
