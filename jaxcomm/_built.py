"""Which jaxcomm this is: its version, and its compiled extension if it has one.

The only file that imports the extension. The others take ``_ffi`` from here.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any, NoReturn

from jaxcomm.errors import CommunicatorError

_FOLDER = pathlib.Path(__file__).parent
# Only a build without the extension writes this module, see pyproject.toml. So an
# extension that was lost, or was not built yet, is an error.
_MARKER = "jaxcomm._without_extension"
_WITHOUT = (
    "this jaxcomm has no compiled extension (wheel py3-none-any). The extension is for "
    "Linux: install the wheel for Linux, or build jaxcomm with a C++17 compiler"
)


class _Absent:
    """Stands for the extension where there is none, and refuses whatever is asked."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, such as inspect's
            raise AttributeError(name)
        raise CommunicatorError(f"{name}: {_WITHOUT}")


def _load() -> tuple[Any, str]:
    """Return the extension and "", or what stands for it and why there is none."""
    found = importlib.util.find_spec("jaxcomm._ffi")
    if found is not None:
        try:
            return importlib.import_module("jaxcomm._ffi"), ""
        except ImportError as error:
            raise ImportError(
                f"jaxcomm's compiled extension {found.origin} does not load: {error}. "
                f"It may be of another Python or system: install jaxcomm anew"
            ) from error
    if importlib.util.find_spec(_MARKER) is not None:
        return _Absent(), _WITHOUT
    others = [
        path.name for path in sorted(_FOLDER.glob("_ffi*")) if path.suffix != ".pyi"
    ]
    only = f" (only {', '.join(others)}, of another Python or system)" if others else ""
    raise ImportError(
        f"jaxcomm's compiled extension is not in {_FOLDER}{only}. In a clone of the "
        f"sources, Python finds that folder before the installed package: start Python "
        f"in another folder, or run `make develop` once. Elsewhere, install jaxcomm "
        f"anew, without the extension by JAXCOMM_NO_EXTENSION=1 pip install ."
    )


if TYPE_CHECKING:
    from jaxcomm import _ffi as _ffi

    ABSENCE: str
else:
    # Why there is no extension, "" if there is one.
    _ffi, ABSENCE = _load()

try:
    VERSION = importlib.metadata.version("jaxcomm")
except importlib.metadata.PackageNotFoundError:  # run from the source tree
    VERSION = "0+unknown"
