"""Two launchers on this machine are two hosts. One is killed, or a process of one."""

import os
import re
import signal

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
if i == 3:
    forever()
try:
    step(mesh)
except (jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError) as error:
    print("process", i, "cause", " ".join(str(error).split()))
    mesh = jaxcomm.shrink(mesh, "i")
    print("process", i, "after", step(mesh))
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
        started(*options, f"--host={host}", script, env=variables) for host in range(2)
    ]
    for i in range(4):
        waiting.until(lambda i=i: (notes / f"pid-{i}").exists(), process=both[0])
    return both


def said(out, what):
    return sorted(re.findall(rf"process \d {what} .*", out))


def test_if_a_host_is_lost_all_others_learn_it_and_go_on(hosts):
    hosts[1].kill()
    out, err = waiting.ended(hosts[0])
    assert hosts[0].returncode == 0, err
    causes = said(out, "cause")
    assert len(causes) == 2
    assert all(re.search(r"process [23] has ended", cause) for cause in causes), causes
    assert said(out, "after") == [f"process {i} after (2, 3.0)" for i in range(2)]
    assert "process 2 was lost with host 1; 3 others go on" in err
    assert "process 3 was lost with host 1; 2 others go on" in err


def test_if_a_process_of_another_host_ends_all_learn_it_and_go_on(hosts, notes):
    os.kill(int((notes / "pid-3").read_text()), signal.SIGKILL)
    both = [waiting.ended(each) for each in hosts]
    assert [each.returncode for each in hosts] == [0, 0], both
    out = "".join(out for out, _ in both)
    causes = said(out, "cause")
    assert len(causes) == 3, out
    has_ended = re.compile(r"process 3 (\(rank 3\) )?has ended")
    assert all(map(has_ended.search, causes)), causes
    assert said(out, "after") == [f"process {i} after (3, 6.0)" for i in range(3)]
    for _, err in both:
        assert "process 3 was ended by SIGKILL; 3 others go on" in err
