"""The environment variables that each process is started with."""

from collections.abc import Mapping

from jaxcomm.launch import devices
from jaxcomm.launch.options import Options

LOOPBACK = "127.0.0.1"
# What an address of gRPC begins with that is the path of a socket.
SOCKET = "unix:"


def of_process(
    process: int,
    options: Options,
    address: str,
    inherited: Mapping[str, str],
    place: int | None = None,
) -> dict[str, str]:
    """Return the environment of one process.

    Args:
      process: its id.
      options: what was asked for.
      address: of the coordinator.
      inherited: what all processes have.
      place: of the process on its host, which says what GPUs it has. If None, its
        number there.
    """
    environment = dict(inherited)
    environment["JAX_COORDINATOR_ADDRESS"] = address
    # JAX would serve it on every interface of the host.
    environment["JAX_COORDINATOR_BIND_ADDRESS"] = address
    if options.elastic:
        environment["JAXCOMM_ELASTIC"] = "1"
    environment["JAX_NUM_PROCESSES"] = str(options.total)
    environment["JAX_PROCESS_ID"] = str(process)
    platform = options.platform or inherited.get("JAX_PLATFORMS") or devices.CPU
    environment["JAX_PLATFORMS"] = platform
    first_platform = platform.split(",")[0]
    if first_platform == devices.CPU and options.devices_per_process is not None:
        # Counts for more than the number in XLA_FLAGS.
        environment["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_process)
    if first_platform in devices.GPUS and (
        options.devices_per_process is not None
        or "JAX_LOCAL_DEVICE_IDS" not in inherited
    ):
        # One each unless told otherwise, as JAX does under Slurm and Open MPI.
        place = process - options.first if place is None else place
        ids = devices.ids_of(place, options.devices_per_process)
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
    if not address.startswith(SOCKET):
        _keep_from_proxies(environment, address.rpartition(":")[0] or LOOPBACK)
    return environment


def _keep_from_proxies(environment, host):
    # jax.distributed speaks gRPC, which would ask a proxy for the way to the host,
    # until jax.distributed.initialize times out. no_grpc_proxy hides no_proxy.
    if not any(
        name in environment for name in ("grpc_proxy", "http_proxy", "https_proxy")
    ):
        return
    direct = environment.get("no_grpc_proxy") or environment.get("no_proxy")
    environment["no_grpc_proxy"] = f"{direct},{host}" if direct else host
