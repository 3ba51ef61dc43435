"""One program, whoever starts its processes."""

import os
import re
import sys

import forked
import ports
import pytest
import waiting

from jaxcomm.launch import child

pytestmark = pytest.mark.multiprocess


def results(out):
    """Keeps our program's lines; gloo writes some of its own to stdout."""
    return sorted(re.findall("process .*", out))


def test_the_processes_are_joined_however_each_asks(launch, sums_device_ids):
    # mpi4py need not be there: the launcher answers for the cluster.
    styles = "nothing", "initialize", "mpi4py", "explicit"
    status, out, err = launch(
        sums_device_ids, *styles, processes=4, devices_per_process=2
    )
    assert status == 0, err
    assert results(out) == [f"process {i} of 4 devices 2 of 8 right" for i in range(4)]


def test_the_program_has_its_say_before_jax_is_imported(launch):
    status, out, err = launch(
        """
assert "jax" not in sys.modules
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jaxcomm, jax
assert not jax.distributed.is_initialized()
print("process", jax.numpy.zeros(1).dtype, jax.device_count(), jax.process_count())
assert jax.distributed.is_initialized()

# JAX takes SIGTERM for news. What is forked from the process does not.
import warnings
warnings.simplefilter("ignore")
ready, tell_ready = os.pipe()
if (pid := os.fork()) == 0:
    os.write(tell_ready, b"x")
    forever()
os.read(ready, 1)
os.kill(pid, signal.SIGTERM)
ended = until(lambda: os.waitpid(pid, os.WNOHANG)[1], "the child's end")
print("process that was forked ended by", os.WTERMSIG(ended))
""",
        processes=1,
    )
    assert status == 0, err
    assert results(out) == [
        "process float64 3 1",
        "process that was forked ended by 15",
    ]


def test_a_program_may_choose_another_address_unless_the_launcher_serves(launch):
    text = f"""
import jax
address = "127.0.0.1:{ports.free()}"
jax.distributed.initialize(address, initialization_timeout=60)
print("process", i, jax.process_count(), "at", address)
"""
    status, out, err = launch(text)
    assert status == 0, err
    assert len(results(out)) == 2
    status, _, err = launch(text, elastic=True, processes=1)
    assert status == 1
    assert "asked for, and the launcher serves at 'unix:" in err


def test_a_failure_under_jax_is_told_at_once(launch):
    # JAX waits at the end of a process for the others, and takes SIGTERM for news.
    status, _, err = launch(
        """
import jax
jax.devices()
if i == 1: raise ValueError("mine")
forever()
""",
        grace=0.5,
    )
    assert status == 1
    assert "[1] ValueError: mine" in err
    assert "process 1 ended with status 1; stopping the others" in err


def test_by_hand(program, sums_device_ids):
    address = f"127.0.0.1:{ports.free()}"
    place = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PROCESS_ID": "0",
    }
    path = program(sums_device_ids)
    # What the program says itself holds.
    done = forked.run(
        [sys.executable, "-m", "jaxcomm.launch.child", path, "alone"],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == ["process 0 of 1 devices 2 of 2 right"]


@pytest.mark.parametrize("word", ["x.py", "--help", "--bogus=x"])
def test_by_hand_without_a_place_says_how(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["child.py", word, "b"])
    with pytest.raises(SystemExit) as raised:
        child.main()
    said = capsys.readouterr().out or str(raised.value.code)
    assert (raised.value.code == 0) == (word == "--help")
    assert "JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=n" in said
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(SystemExit, match="JAX_NUM_PROCESSES='two' is no number"):
        child.place()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "first")
    with pytest.raises(SystemExit, match="ADDRESS='first' is no host:port"):
        child.place()
