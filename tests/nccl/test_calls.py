"""What one operation asks of NCCL and CUDA, and nothing beside it."""

import collections
import ctypes

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import waiting
from models import over

import jaxcomm

# Of the backend's own thread, which looks whether operations are done.
POLLS = {"cuEventQuery", "ncclCommGetAsyncError", "cuStreamQuery", "cuCtxGetCurrent"}
CONTEXTS = {"cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"}
ALLOCATIONS = {
    "cuMemAlloc_v2", "cuMemFree_v2", "ncclMemAlloc", "ncclMemFree", "cuEventCreate",
    "cuEventDestroy_v2", "cuStreamCreateWithPriority", "cuStreamDestroy_v2",
    "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommRegister",
    "ncclCommWindowRegister", "ncclCommDestroy", "cuMemGetInfo_v2",
}  # fmt: skip
WAITS = {"cuStreamSynchronize", "cuStreamWaitEvent", "cuCtxSynchronize"}


def test_a_sum_is_one_call_on_one_stream(stand_in, make_mesh):
    program = over(make_mesh(i=2), lambda x: jaxcomm.psum(x, "i"), out=jax.P())
    x = jnp.arange(8.0)
    jax.block_until_ready(program(x))
    stand_in.clear()
    jax.block_until_ready(program(x))
    calls = [c for c in stand_in.trace() if c["name"] not in POLLS | CONTEXTS]
    streams = collections.defaultdict(list)
    for call in calls:
        streams[call.get("stream")].append(call["name"])
    # No group around one call, and nothing else that no stream names.
    assert set(streams.pop(None, ())) <= {"launch"}
    assert len(streams) == 2
    for names in streams.values():
        assert names == ["cuEventRecord", "ncclAllReduce", "cuEventRecord"]
    (reduction, _) = stand_in.trace("ncclAllReduce")
    assert (reduction["count"], reduction["type"], reduction["op"]) == (4, 7, 0)
    assert "group" not in reduction


def test_once_warm_nothing_is_allocated_made_or_waited_for(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    choice = catalogue.fixed(2)
    # ragged_all_to_all has to know its offsets on the host.
    cases = [c for n, c in catalogue.CASES.items() if n != "ragged_all_to_all"]

    def every(x):
        return {case.name: case(jaxcomm, x[0], "i", choice) for case in cases}

    program = over(mesh, every)
    x = jnp.ones((2, 2, 2, 3), jnp.float32)
    jax.block_until_ready(program(x))
    report = jaxcomm.memory_report()
    stand_in.clear()
    for _ in range(3):
        jax.block_until_ready(program(x))
    used = collections.Counter(call["name"] for call in stand_in.trace())
    moves = "AllGather AllReduce AlltoAll Broadcast Gather Recv Reduce ReduceScatter"
    assert set(used) >= {f"nccl{name}" for name in f"{moves} Scatter Send".split()}
    assert not set(used) & (ALLOCATIONS | WAITS)
    assert jaxcomm.memory_report() == report
    assert not [call for call in stand_in.trace() if "violation" in call]
    known = {"cuEventRecord", "cuStreamIsCapturing", "cuMemcpyDtoDAsync_v2", "launch"}
    known |= {"cuMemsetD8Async"} | POLLS | CONTEXTS
    assert not {name for name in set(used) - known if not name.startswith("nccl")}


def test_the_current_context_is_left_as_found(stand_in, make_mesh):
    """PyTorch or CuPy in the same thread go on with the device they had chosen."""
    stand_in.cuInit(0)
    context, found = ctypes.c_void_p(), ctypes.c_void_p()
    stand_in.cuDevicePrimaryCtxRetain(ctypes.byref(context), 3)
    mesh = make_mesh(i=2)
    for mine in (context, None):
        if mine is not None:
            stand_in.cuCtxPushCurrent_v2(mine)
        jaxcomm.init(mesh)
        x = jnp.arange(2.0)
        program = over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())
        jax.block_until_ready(program(x))
        jaxcomm.finalize()
        stand_in.cuCtxGetCurrent(ctypes.byref(found))
        assert found.value == (mine.value if mine is not None else None)
        if mine is not None:
            stand_in.cuCtxPopCurrent_v2(ctypes.byref(found))
    stand_in.cuDevicePrimaryCtxRelease_v2(3)

    def threads(name):
        calls = stand_in.trace(f"cuCtx{name}Current_v2")
        return collections.Counter(call["thread"] for call in calls)

    # The thread that watches over communicators may be between the two. What CUDA's
    # runtime made current is popped, too.
    waiting.until(lambda: not threads("Push") - threads("Pop"))


def test_lanes_have_streams_of_their_own(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes=("default", "other"))

    def both(x):
        return jaxcomm.psum(x, "i"), jaxcomm.psum(x * 2, "i", lane="other")

    stand_in.clear()
    one, two = over(mesh, both, out=(jax.P(), jax.P()))(jnp.arange(2.0))
    np.testing.assert_array_equal((one[0], two[0]), (1, 2))
    calls = stand_in.trace("ncclAllReduce")
    assert len({(call["comm"], call["stream"]) for call in calls}) == 4
