"""Says what to do where the extension was not built: in the source tree."""

import importlib.util
import pathlib

if importlib.util.find_spec("jaxcomm._ffi") is None:
    raise ImportError(
        f"jaxcomm's compiled extension is not in {pathlib.Path(__file__).parent}. In a "
        f"clone of the sources, Python finds that folder before the installed package: "
        f"start Python in another folder, or run `make develop` once"
    )
