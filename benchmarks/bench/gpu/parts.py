"""The parts of ``bench gpu``, in the order in which they run."""

from collections.abc import Callable, Iterable

from bench.gpu import (
    attention,
    collectives,
    dispatch,
    documents,
    lanes,
    masks,
    memory,
    meshes,
    overlap,
    states,
    strategies,
    symmetric,
    torch_peer,
    training,
)
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer

# Each makes the communicators it needs; all processes run all of it.
PARTS: dict[str, Callable[[Timer], Iterable[Figure | Finding]]] = {
    "memory": memory.rows,
    "collectives": collectives.rows,
    "meshes": meshes.rows,
    "dispatch": dispatch.rows,
    "overlap": overlap.rows,
    "lanes": lanes.rows,
    "symmetric": symmetric.rows,
    "attention": attention.rows,
    "strategies": strategies.rows,
    "documents": documents.rows,
    "masks": masks.rows,
    "states": states.rows,
    "training": training.rows,
    "torch": torch_peer.rows,
}
