"""C3: a notebook's kernel is restarted, alone or as one of two that work together."""

import contextlib
import os

import ports
import pytest
import waiting

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.multiprocess, pytest.mark.notebook]

JOIN = """
import jax, jaxcomm
import numpy as np
if {count} > 1:
    jax.distributed.initialize("127.0.0.1:{port}", {count}, {index},
                               coordinator_bind_address="127.0.0.1:{port}")
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback(
    (2,), jax.NamedSharding(mesh, jax.P("i")),
    lambda where: np.arange(1, 3, dtype=np.float32)[where])
psum = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh,
                             in_specs=jax.P("i"), out_specs=jax.P("i")))
"""
SHOW = """
result = psum(x)
print([float(np.asarray(s.data)[0]) for s in result.addressable_shards])
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
        self._environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
        }
        self._manager.start_kernel(env=self._environment)
        self._connect()

    def _connect(self):
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(waiting.HANG_SECONDS)

    @property
    def pid(self):
        return self._manager.provisioner.pid

    def begin(self, code):
        self._running = self._client.execute(code)

    def end(self):
        """Returns what the cell printed, or its exception."""
        said = []
        while True:
            message = self._client.get_iopub_msg(timeout=waiting.HANG_SECONDS)
            if message["parent_header"].get("msg_id") != self._running:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
            elif message["msg_type"] == "error":
                said.append(f"{content['ename']}: {content['evalue']}")
            elif content.get("execution_state") == "idle":
                return "".join(said).strip()

    def run(self, code):
        self.begin(code)
        return self.end()

    def restart(self):
        """As the button does; returns the process id that was."""
        pid = self.pid
        self._client.stop_channels()
        self._manager.restart_kernel(env=self._environment)
        self._connect()
        return pid

    def stop(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


@pytest.fixture
def kernels():
    """Gives ``kernels(count, devices)``."""
    with contextlib.ExitStack() as stack:

        def begin(count, devices):
            made = [Kernel(devices) for _ in range(count)]
            for kernel in made:
                stack.callback(kernel.stop)
            return made

        yield begin


def assert_nothing_left(pids):
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
        assert not [
            n for n in os.listdir("/dev/shm") if n.startswith(f"jaxcomm-{pid}-")
        ]


def test_a_kernel_is_restarted_while_a_rank_waits(kernels):
    (kernel,) = kernels(1, devices=2)
    join = JOIN.format(count=1, index=0, port=0)
    assert kernel.run(join + SHOW) == "[3.0, 3.0]"
    assert kernel.run(STUCK) == "waiting"
    before = kernel.restart()
    assert kernel.run(join + SHOW) == "[3.0, 3.0]"
    assert_nothing_left([before])


@pytest.mark.thorough
def test_one_of_two_kernels_is_restarted_and_then_the_other(kernels):
    both = kernels(2, devices=1)

    def join_and_show():
        port = ports.free()
        for index, kernel in enumerate(both):
            kernel.begin(JOIN.format(count=2, index=index, port=port) + SHOW)
        assert [kernel.end() for kernel in both] == ["[3.0]", "[3.0]"]

    join_and_show()
    first, second = both
    first.begin(SHOW)
    before = [second.restart()]
    # Nothing of the first one was lost but its neighbour.
    told = first.end()
    assert "psum(float32[1]) over axes ('i',)" in told
    assert "gone with process 1" in told
    assert first.run("print(mesh.devices.size)") == "2"
    before.append(first.restart())
    join_and_show()
    assert_nothing_left(before)
