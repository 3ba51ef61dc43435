"""The same operation by jaxcomm, by XLA's gloo and by mpi4jax, and a copy beside."""

import functools
import importlib.metadata
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from bench import chain, collectives, devices
from bench.cases import check_agreement
from bench.rows import GLOO, MPI4JAX, OURS

CHAIN = f"{chain.LENGTH} dependent psums"
MEMCPY = "memcpy"
_SPLIT = jax.P(devices.AXIS)
# Float32 sums in another order, fifty times.
_CHAIN_TOLERANCE = 1e-4


def versions(with_mpi: bool) -> str:
    """Return the rivals of this process, in words."""
    gloo = f"{GLOO} of jaxlib {importlib.metadata.version('jaxlib')}"
    if not with_mpi:
        return gloo
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    name, numbers = MPI.get_vendor()
    version = importlib.metadata.version("mpi4jax")
    library = f"{name} {'.'.join(map(str, numbers))}"
    return f"{gloo}; {MPI4JAX} {version} with {library}"


def build(
    name: str, size: int, copy_bytes: int, count: int, rank: int, no_mpi: str
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Compile the variants, run them and compare their results.

    Args:
      name: ``CHAIN`` or a key of ``collectives.OPS``.
      size: bytes of each process's operand.
      copy_bytes: what this process copies as its part of the roofline.
      count: processes.
      rank: of this one.
      no_mpi: why there is no mpi4jax. If empty, there is.

    Returns:
      What to call, by variant, ours first and the copy last, each returning when its
      work is done; and by name of each missing variant why it is missing.

    Raises:
      ValueError: results differ.
    """
    op = collectives.OPS["psum" if name == CHAIN else name]
    mesh = devices.mesh_of(count)
    length = size // jnp.dtype(op.dtype).itemsize
    # Sums of these are exact in any order, and ranks differ.
    local = (np.arange(length) + rank * length) % 7 + rank
    local = local.astype(op.dtype)
    split = jax.NamedSharding(mesh, _SPLIT)
    spread = jax.make_array_from_process_local_data(split, local)
    calls, absent = {}, {}
    reason = _why_not_ours(mesh)
    if reason:
        absent[OURS] = reason
    else:
        calls[OURS] = _start(_mapped(name, op, jaxcomm, mesh), spread)
    calls[GLOO] = _start(_mapped(name, op, jax.lax, mesh), spread)
    by_mpi = None if no_mpi else _by_mpi(name, count, rank)
    if by_mpi is None:
        absent[MPI4JAX] = no_mpi or "has no such operation"
    else:
        calls[MPI4JAX] = _start(jax.jit(by_mpi), jnp.asarray(local))
    # A result that is wrong has no speed. This also compiles and warms up.
    check_agreement(
        {variant: _of_this_rank(call()) for variant, call in calls.items()},
        _CHAIN_TOLERANCE if name == CHAIN else 0.0,
    )
    source, target = np.ones(copy_bytes, np.uint8), np.zeros(copy_bytes, np.uint8)
    calls[MEMCPY] = functools.partial(np.copyto, target, source)
    return calls, absent


def _why_not_ours(mesh):
    try:
        (communicator,) = jaxcomm.init(mesh, devices.AXIS)
    except jaxcomm.CommunicatorError as error:
        return str(error)
    # XLA's collectives are measured under the name of gloo.
    if communicator.backend != "host":
        return f"its backend here is {communicator.backend!r}, not 'host'"
    return ""


def _start(function, x):
    return lambda: jax.block_until_ready(function(x))


def _mapped(name, op, module, mesh):
    """Return the operation of ``jaxcomm`` or ``jax.lax``, jitted."""
    if name == CHAIN:
        body, out_spec = functools.partial(chain.chain_over_axis, module.psum), _SPLIT
    else:
        body, out_spec = functools.partial(op.call, module), op.out_spec
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=_SPLIT, out_specs=out_spec))


def _by_mpi(name, count, rank):
    """Return the operation of mpi4jax on one rank's operand, None if it has none."""
    # Here, because it is optional and starts the devices.
    import mpi4jax  # pyright: ignore[reportMissingImports]
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    def psum(x):
        return mpi4jax.allreduce(x, op=MPI.SUM)

    def ppermute(x):
        return mpi4jax.sendrecv(x, x, (rank - 1) % count, (rank + 1) % count)

    def all_to_all(x):
        return mpi4jax.alltoall(x.reshape(count, -1))

    return {
        CHAIN: functools.partial(chain.chain, psum, rank=rank, size=count),
        "psum": psum,
        "pmax": lambda x: mpi4jax.allreduce(x, op=MPI.MAX),
        "pmin": lambda x: mpi4jax.allreduce(x, op=MPI.MIN),
        "ppermute": ppermute,
        "all_gather": mpi4jax.allgather,
        "all_to_all": all_to_all,
    }.get(name)


def _of_this_rank(result):
    return np.asarray(result.addressable_data(0)).reshape(-1)
