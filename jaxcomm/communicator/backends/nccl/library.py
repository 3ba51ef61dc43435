"""Finding NCCL: loaded when first needed, never linked, one copy in a process."""

import dataclasses
import functools
import importlib.util
import os
import pathlib

from jaxcomm import config
from jaxcomm._built import _ffi


@dataclasses.dataclass(frozen=True)
class Library:
    """The NCCL of this process.

    Attributes:
      path: the file it was loaded from.
      version: such as ``"2.28.9"``.
      version_code: such as 22809.
      driver_version: of CUDA that the driver serves, such as ``"13.0"``.
      missing: optional functions that this version lacks.
    """

    path: str
    version: str
    version_code: int
    driver_version: str
    missing: tuple[str, ...]


@functools.cache
def load() -> Library | str:
    """Return the library, or why there is none."""
    try:
        found = _ffi.load_nccl(_candidates())
    except RuntimeError as error:
        return str(error)
    return Library(
        path=found["path"],
        version=found["version"],
        version_code=found["version_code"],
        driver_version=found["driver_version"],
        missing=tuple(found["missing"]),
    )


def _candidates() -> list[str]:
    named = config.nccl_library()
    if named:
        return [named]
    paths = []
    # Beside XLA's plugin: what it would load itself.
    for package in ("nvidia.nccl", "nvidia.cu13", "nvidia.cu12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            path = pathlib.Path(folder, "lib", "libnccl.so.2")
            if os.path.exists(path):
                paths.append(str(path))
    return [*paths, "libnccl.so.2"]
