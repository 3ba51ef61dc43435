"""Starting ``bench gpu`` as several processes, of GPUs of their own or one.

Nothing here starts JAX.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

from bench.gpu.options import Options
from bench.options import UsageError
from jaxcomm.communicator.backends.nccl import library
from jaxcomm.launch import options as launch
from jaxcomm.launch import run

# The first NCCL of which several ranks may use one GPU.
_SHARED_GPU_SINCE = 23003, "2.30.3"
# Thread blocks of a GPU that NCCL's operations of all ranks may take together.
_CTAS = 8
_MPS = "nvidia-cuda-mps-control"


def are_started() -> bool:
    """Says whether this is one of several processes already."""
    return int(os.environ.get("JAX_NUM_PROCESSES", "1")) > 1


def start(words: Sequence[str], asked: Options, platform: str) -> int:
    """Runs the command once more in each of the processes; returns the status.

    Args:
      words: the command's own.
      asked: what they mean.
      platform: for JAX.

    Raises:
      UsageError: NCCL does not let ranks share a GPU.
    """
    if asked.one_gpu:
        os.environ |= for_one_gpu(asked.ranks)
    shares = asked.one_gpu and platform != "cpu"
    return run.run(
        launch.Options(
            processes=asked.processes,
            module=True,
            script="bench",
            arguments=("gpu", *words),
            # On one GPU the environment says which.
            devices_per_process=None if shares else asked.ranks // asked.processes,
            platform=platform,
            prefix=False,
        )
    )


def for_one_gpu(ranks: int) -> dict[str, str]:
    """Returns environment variables for ranks that share GPU 0, a process each.

    Raises:
      UsageError: NCCL does not let them.
    """
    found = library.load()
    if isinstance(found, str):
        raise UsageError(f"--one-gpu: {found}")
    code, version = _SHARED_GPU_SINCE
    if found.version_code < code:
        raise UsageError(
            f"--one-gpu: ranks share a GPU from NCCL {version} on, and {found.path} is "
            f"{found.version}. Name a newer one in LD_PRELOAD, by the path of its "
            "libnccl.so.2"
        )
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # Multicast wants a GPU for each rank; the monitor of each process, one port.
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, _CTAS // ranks)),
        "CUDA_VISIBLE_DEVICES": "0",
        "JAX_LOCAL_DEVICE_IDS": "0",
    }


def sharing() -> str:
    """Returns in words how processes share a GPU: at once, or in turns."""
    turns = "they take turns, and operations wait for whole turns: times say little"
    if shutil.which(_MPS) is None:
        return f"without MPS ({_MPS} is not installed) {turns}"
    try:
        asked = subprocess.run(
            [_MPS], input="get_server_list\n", text=True, capture_output=True,
            timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        asked = None
    if asked is None or asked.returncode:
        return f"without a daemon of MPS (start one with {_MPS} -d) {turns}"
    return "MPS lets them run at once"
