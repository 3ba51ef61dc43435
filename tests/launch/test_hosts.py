"""Two launchers on this machine are two hosts. A process of one is killed, then one."""

import os
import re
import signal

import forked
import ports
import pytest
import waiting
from team import environment

from jaxcomm.launch import records

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import jax
import numpy as np
import jaxcomm
from jaxcomm.communicator import hosts

# No process is to see others end that another launcher has started.
hosts._boot_id = lambda: f"host {i // 2}"
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(on_failure="poison"))
own = jax.device_put(np.full(3, 1 + i, np.float32), jax.local_devices()[0])

def step(mesh):
    x = jax.make_array_from_single_device_arrays(
        (3 * mesh.size,), jax.NamedSharding(mesh, jax.P("i")), [own])
    add = jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                        in_specs=jax.P("i"), out_specs=jax.P())
    sums = jaxcomm.raise_if_failed(jax.jit(add)(x))
    return mesh.size, float(np.asarray(sums.addressable_data(0))[0])

print("process", i, "before", step(mesh))
tell(f"pid-{i}", str(os.getpid()))
for those, what in ([1], "process"), ([2, 3], "host"):
    if i in those:
        forever()
    try:
        step(mesh)
    except (jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError) as error:
        mesh = jaxcomm.shrink(mesh, "i")
        tell(f"{what}-{i}", f"{error}; after that {step(mesh)}")
"""


@pytest.fixture
def hosts(stand_in_path, program, notes, started, secret):
    """Two launchers, once all four processes have added; all is in one group."""
    variables = environment() | {
        "JAXCOMM_NCCL_LIBRARY": stand_in_path,
        "JAXCOMM_BACKEND": "nccl",
        records.VARIABLE: str(notes),
    }
    options = ["-n2", "--hosts=2", "--elastic"]
    options += [f"--secret={secret}", f"--coordinator=127.0.0.1:{ports.free(2)}"]
    script = program(PROGRAM)
    both = [
        started(*options, f"--host={host}", script, words=forked.LAUNCH, env=variables)
        for host in range(2)
    ]
    for i in range(4):
        waiting.until(lambda i=i: (notes / f"pid-{i}").exists(), process=both[0])
    return both


def test_a_process_is_lost_and_then_a_host_and_all_others_go_on(hosts, notes):
    def told(name):
        waiting.until((notes / name).exists, process=hosts[0])
        return (notes / name).read_text()

    os.kill(int((notes / "pid-1").read_text()), signal.SIGKILL)
    for i in (0, 2, 3):
        text = told(f"process-{i}")
        assert re.search(r"process 1 (\(rank 1\) )?has ended", text)
        assert text.endswith("; after that (3, 8.0)")
    goes_on = "process 1 was ended by SIGKILL; 3 others go on"
    assert any(goes_on in line for line in hosts[1].stderr)
    hosts[1].kill()
    text = told("host-0")
    assert re.search(r"process [23] (\(rank \d\) )?has ended", text)
    assert text.endswith("; after that (1, 1.0)")
    _, err = waiting.ended(hosts[0])
    assert hosts[0].returncode == 0, err
    assert goes_on in err
    lost = re.findall(r"process [23] was lost with host 1; (.*)", err)
    assert lost == ["2 others go on", "1 other goes on"], err
