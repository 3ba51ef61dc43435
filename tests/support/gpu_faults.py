"""What tests do to a GPU below JAX, by the driver; on CPU devices the like of it."""

import ctypes
import sys

import jax

# A kernel that never ends.
_SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin()
{
again:
  nanosleep.u32 1000;
  bra again;
}
\0"""
_THREADS, _BLOCKS = 1024, 4096


def _cuda():
    """Return the driver, with the context that JAX has made current."""
    cuda = ctypes.CDLL("libcuda.so.1")
    ordinal = jax.local_devices()[0].local_hardware_id
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        assert status == 0, status
    return cuda


def spin():
    """Fill this process's GPU with a kernel that never ends."""
    if jax.default_backend() == "cpu":
        forever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x > 0, abs, x))
        jax.block_until_ready(forever(1.0))
    cuda = _cuda()
    module, function, stream = (ctypes.c_void_p() for _ in range(3))
    for status in (
        cuda.cuModuleLoadData(ctypes.byref(module), _SPIN),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"),
        cuda.cuStreamCreate(ctypes.byref(stream), 1),
        cuda.cuLaunchKernel(
            function, _BLOCKS, 1, 1, _THREADS, 1, 1, 0, stream, None, None
        ),
    ):
        assert status == 0, status
    print("a kernel spins", file=sys.stderr, flush=True)


def used_memory():
    """Return the memory of this process's GPU that is taken, in bytes; 0 on CPU."""
    if jax.default_backend() == "cpu":
        return 0
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda = _cuda()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value
