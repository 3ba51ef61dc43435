"""The records of two real processes, one of which is held up, then killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import forked
import pytest
import waiting

from jaxcomm.diagnostics.merge import merge_files

pytestmark = pytest.mark.multiprocess

# Device 1 of process 1, rank 3, waits for good before its second operation.
PROGRAM = r"""
import sys
import jax
import numpy as np
import waiting

port, process = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process),
                           cluster_detection_method="deactivate",
                           coordinator_bind_address=f"127.0.0.1:{port}")
import jaxcomm

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.NamedSharding(mesh, jax.P("i"))
x = jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4.0)[index])


def jitted(call):
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"),
                                 out_specs=jax.P("i"), check_vma=False))


def wait(i):
    if int(i) == 3:
        waiting.forever()
    return np.float32(0)


def held_up(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"))
    return jaxcomm.all_gather(x + late, "i", tiled=True)


def others_wait():
    (found,) = jaxcomm.flight_record().process.communicators
    started = sum(entry.state == "started" for entry in found.entries)
    return started == 2 - int(process)


jax.block_until_ready(jitted(lambda x: jaxcomm.psum(x, "i"))(x))
out = jitted(held_up)(x)
(communicator,) = jaxcomm.communicators()
assert communicator.backend == "host", communicator.transport
waiting.until(others_wait)
print("waits", flush=True)
jax.block_until_ready(out)
"""


def of_another_path(process):
    """Returns the program as a process has it, whose run ids of XLA's differ then."""
    return f"exec(compile({PROGRAM!r}, '/home/{process}/train.py', 'exec'))"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dumps"


@pytest.fixture
def processes(folder):
    """Two processes that wait in their second operation; killed in the end."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("JAX", "XLA_")) and "_proxy" not in name.lower()
    }
    with contextlib.ExitStack() as stack:
        # Kept, so that nobody else gets it; gRPC can bind it all the same.
        keeper = stack.enter_context(socket.socket())
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", 0))
        port = str(keeper.getsockname()[1])
        started = []
        for process in range(2):
            popen = forked.Popen(
                [sys.executable, "-c", of_another_path(process), port, str(process)],
                env=inherited
                | {
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": "2",
                    "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
                    "JAXCOMM_DUMP_DIR": str(folder),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(popen.communicate)
            stack.callback(popen.kill)
            started.append(popen)
        for popen in started:
            line = popen.stdout.readline()
            assert line == "waits\n", popen.stderr.read()
        yield started


def dumped(popen):
    """Waits until a process says that it has written its record; returns the line."""
    for line in popen.stderr:
        if line.startswith("jaxcomm: ") and "flight record: " in line:
            return line
    raise AssertionError("it ended without")


def test_records_name_the_rank_that_holds_up_the_others_and_the_one_that_was_killed(
    processes, folder
):
    for popen in processes:
        popen.send_signal(signal.SIGUSR1)
    paths = [folder / f"flight-record-{process}.json" for process in range(2)]
    for path, popen in zip(paths, processes, strict=True):
        line = dumped(popen)
        assert f"flight record: {path}; compare all with python -m jaxcomm.doc" in line
        assert line.endswith(f" --merge {folder}/flight-record-*.json\n")
    merged = merge_files(paths)
    assert merged.missing == ()
    assert {record.reason for record in merged.records.values()} == {"signal"}
    (finding,) = merged.findings
    assert (finding.kind, finding.ranks) == ("behind", (3,))
    group = merged.groups[finding.group]
    assert finding.text == (
        f"rank 3 (process 1, cpu:{group.devices[3]}) last completed psum(float32[1]) "
        f"#1; ranks 0-2 wait in all_gather(float32[1]) #2"
    )
    # Ranks of both processes agree on what is one operation.
    sites = {
        (entry.sequence, entry.site)
        for entries in group.entries.values()
        for entry in entries
    }
    assert len(sites) == 2

    processes[1].kill()
    assert "process 0 of 2: a collective failed (" in dumped(processes[0])
    merged = merge_files(paths[:1])
    assert merged.missing == (1,)
    (finding,) = merged.findings
    assert finding.text.startswith(
        f"rank 2 (process 1, cpu:{group.devices[2]}) and rank 3 (process 1, "
        f"cpu:{group.devices[3]}) left no record; rank 0 (process 0, cpu:0) and rank 1 "
        f"(process 0, cpu:1) "
    )
    assert finding.text.endswith(" in all_gather(float32[1]) #2")
