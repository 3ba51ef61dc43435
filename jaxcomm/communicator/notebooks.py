"""In a notebook, an interrupt ends what the cell waits for.

Python raises KeyboardInterrupt in the cell, and XLA's program waits on: the next cell
would wait for its devices until the timeout.
"""

import sys

from jaxcomm._built import ABSENCE, _ffi


def prepare() -> None:
    """Have interrupted cells end their waits, if this is a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or ABSENCE else ipython.get_ipython()
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(result) -> None:
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        _ffi.interrupt_waits()
