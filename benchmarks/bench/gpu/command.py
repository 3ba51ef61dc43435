"""The command ``python -m bench gpu``, from its flags to its status."""

import importlib.util
import os
import sys
from collections.abc import Sequence

import jax

from bench import devices
from bench.gpu import options, processes, sizes
from bench.gpu.record import Record
from bench.gpu.timer import Timer
from bench.options import UsageError
from jaxcomm import config
from jaxcomm.communicator.backends.nccl import devices as nccl_devices
from jaxcomm.communicator.backends.nccl import library

_WRONG_USE = 2


def main(words: Sequence[str]) -> int:
    """Checks, times, prints a table last; returns the exit status."""
    try:
        asked = options.parse(words)
        if importlib.util.find_spec("rich") is None:
            raise UsageError("rich is not installed; pip install 'jaxcomm[bench]'")
        stand_in = _is_stand_in()
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if stand_in:
            # Or CPU devices would be served by the host backend.
            os.environ["JAXCOMM_BACKEND"] = config.BACKEND = "nccl"
        if asked.processes > 1 and not processes.are_started():
            return processes.start(words, asked, "cpu" if stand_in else "cuda")
        return _run(asked, stand_in)
    except UsageError as error:
        print(f"bench gpu: {error}. See --help.", file=sys.stderr)
        return _WRONG_USE


def _is_stand_in():
    found = library.load() if config.nccl_library() else None
    if isinstance(found, str):
        raise UsageError(found)
    return found is not None and nccl_devices.refusal("cpu") is None


def _run(asked, stand_in):
    if stand_in and not processes.are_started():
        devices.simulate(asked.ranks)
    try:
        found = jax.devices("cpu" if stand_in else "gpu")
    except RuntimeError:
        found = []
    if len(found) < asked.ranks:
        raise UsageError(
            f"--ranks: {asked.ranks} ranks were asked for and JAX finds {len(found)} "
            "GPUs; each rank needs one, unless --one-gpu"
        )
    nccl = library.load()
    if isinstance(nccl, str):
        raise UsageError(nccl)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((asked.ranks,), ("i",), auto, devices=found[: asked.ranks])
    usual = sizes.TINY if stand_in else sizes.Sizes()
    timer = Timer(mesh, asked.sizes(usual), shares_gpu=asked.one_gpu)
    # Needs rich.
    from bench.gpu import run

    heading = _heading(timer, nccl)
    # One of several processes writes.
    record = Record(None if jax.process_index() else asked.json, heading)
    return run.run(asked.only, timer, heading, record)


def _heading(timer, nccl):
    kind, count = timer.mesh.devices.flat[0].device_kind, jax.process_count()
    lines = [
        f"{timer.size} ranks on {kind}, processes: {count}, jax {jax.__version__}",
        f"NCCL {nccl.version}, driver of CUDA {nccl.driver_version}",
    ]
    if timer.shares_gpu:
        lines.append(f"all ranks share one GPU: {processes.sharing()}")
    return lines
