"""Which jaxcomm this is, and what to do where the extension was not built."""

import importlib.metadata
import importlib.util
import pathlib

if importlib.util.find_spec("jaxcomm._ffi") is None:
    raise ImportError(
        f"jaxcomm's compiled extension is not in {pathlib.Path(__file__).parent}. In a "
        f"clone of the sources, Python finds that folder before the installed package: "
        f"start Python in another folder, or run `make develop` once"
    )

try:
    VERSION = importlib.metadata.version("jaxcomm")
except importlib.metadata.PackageNotFoundError:  # run from the source tree
    VERSION = "0+unknown"
