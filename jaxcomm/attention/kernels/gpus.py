"""What kernels need to know of the GPUs that a program is compiled for."""

import jax

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import Hop

# Older ones have no bfloat16.
OLDEST = (8, 0)


def local() -> list:
    """Return this process's NVIDIA GPUs; starts JAX's backends."""
    try:
        return jax.local_devices(backend="cuda")
    except compat.NO_DEVICES:
        return []


def capabilities(gpus: list) -> set[tuple[int, ...]]:
    """Return the compute capabilities of GPUs, as (9, 0)."""
    return {tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus}


def why_none_serves(gpus: list) -> str | None:
    """Say why these GPUs have no kernels, or None if they may."""
    if not gpus:
        return "JAX finds no NVIDIA GPU"
    oldest = min(capabilities(gpus))
    if oldest < OLDEST:
        found, needed = (".".join(map(str, x)) for x in (oldest, OLDEST))
        return f"a GPU has compute capability {found}, and it needs {needed}"
    return None


def why_not_compiled(hop: Hop) -> str | None:
    """Say why a program that is being lowered cannot call CUDA's kernels, or None."""
    if hop.platform != "cuda":
        return "the program is compiled for a platform that is not CUDA"
    if hop.automatic_axes:
        return (
            f"shard_map leaves the mesh axes {hop.automatic_axes} to XLA, and kernels "
            "are used where all are manual"
        )
    return None


def are_of_mesh() -> bool:
    """Say whether what is traced is for a mesh of GPUs."""
    return compat.mesh_platform() in ("gpu", "cuda")
