"""C3: a notebook's kernel is restarted."""

import os

import pytest
import team
import waiting

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.multiprocess, pytest.mark.notebook]

SHOW = """
import jax, jaxcomm
import numpy as np
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.numpy.arange(1, 3, dtype="float32")
psum = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                             in_specs=jax.P("i"), out_specs=jax.P("i")))
print(psum(x).tolist())
"""
# Holds one rank up while the other waits for it.
STUCK = """
import waiting
def late(x):
    def come(rank):
        if rank == 0:
            waiting.forever()
        return np.float32(0)
    zero = jax.pure_callback(come, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"))
    return jaxcomm.psum(x + zero, "i")
stuck = jax.jit(jax.shard_map(late, mesh=mesh, in_specs=jax.P("i"),
                              out_specs=jax.P("i"), check_vma=False))(x)
waiting.until(lambda: jaxcomm.communicators()[0].stats()["in_flight"] > 0)
print("waiting")
"""


class Kernel:
    """A kernel and someone who types into it."""

    def __init__(self, devices):
        self._manager = jupyter_client.KernelManager(kernel_name="python3")
        self._environment = team.environment(devices)
        self._manager.start_kernel(env=self._environment)
        self._connect()

    def _connect(self):
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(waiting.HANG_SECONDS)

    def run(self, code):
        """Returns what the cell printed, or its exception."""
        running = self._client.execute(code)
        said = []
        while True:
            message = self._client.get_iopub_msg(timeout=waiting.HANG_SECONDS)
            if message["parent_header"].get("msg_id") != running:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
            elif message["msg_type"] == "error":
                said.append(f"{content['ename']}: {content['evalue']}")
            elif content.get("execution_state") == "idle":
                return "".join(said).strip()

    def restart(self):
        """As the button does; returns the process id that was."""
        pid = self._manager.provisioner.pid
        self._client.stop_channels()
        self._manager.restart_kernel(env=self._environment)
        self._connect()
        return pid

    def stop(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


def test_a_kernel_is_restarted_while_a_rank_waits():
    kernel = Kernel(devices=2)
    try:
        assert kernel.run(SHOW) == "[3.0, 3.0]"
        assert kernel.run(STUCK) == "waiting"
        before = kernel.restart()
        assert kernel.run(SHOW) == "[3.0, 3.0]"
    finally:
        kernel.stop()
    assert not os.path.exists(f"/proc/{before}")
    assert not team.shared_files([before])
