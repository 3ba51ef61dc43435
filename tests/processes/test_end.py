"""A process comes to its end while others still need it."""

import os
import subprocess
import sys

import forked
import pytest
import waiting

from jaxcomm.launch import port

pytestmark = pytest.mark.multiprocess

LEAVES_EARLY = """
import atexit, pathlib, sys
import jax, numpy as np, waiting

process, port, ended = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process,
                           cluster_detection_method="deactivate",
                           coordinator_bind_address=f"127.0.0.1:{port}")
import jaxcomm
from jaxcomm.communicator import shutdown

# However long the other process is stopped.
shutdown.wait_for_work.__defaults__ = (waiting.HANG_SECONDS,)
mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback(
    (4,), jax.NamedSharding(mesh, jax.P("i")), lambda index: np.ones(1, np.float32)
)
program = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                                in_specs=jax.P("i"), out_specs=jax.P("i")))
jax.block_until_ready(program(x))
if process == 0:
    out = program(x)
    atexit.register(ended.touch)  # runs before what jaxcomm has registered
else:
    waiting.until(ended.exists)
    print(program(x).addressable_data(0))
"""


def test_the_last_program_may_be_left_to_itself(tmp_path):
    """A process that comes to its end waits for what others still need of it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA_"))
    }
    with port.reserved(0) as number:
        processes = [
            forked.Popen(
                [sys.executable, "-c", LEAVES_EARLY, *map(str, (i, number, ended))],
                env=environment | {"no_grpc_proxy": "127.0.0.1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i, ended in enumerate([tmp_path / "ended"] * 2)
        ]
        done = [waiting.ended(each) for each in processes]
    assert [each.returncode for each in processes] == [0, 0], done
    assert [out for out, _ in done] == ["", "[4.]\n"]
