"""In a notebook or at a prompt, an interrupt ends what the statement waits for.

Python raises KeyboardInterrupt, and XLA's program waits on: the next statement would
wait for its devices until the timeout.
"""

import sys

from jaxcomm._built import ABSENCE, _ffi


def prepare() -> None:
    """Have interrupted cells and statements end their waits, if somebody types them."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ABSENCE:
        return
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)
    elif sys.flags.interactive or hasattr(sys, "ps1"):
        _after_statements()


def _after_cell(result) -> None:
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        _ffi.interrupt_waits()


def _after_statements() -> None:
    shows = sys.excepthook

    def show(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):
            _ffi.interrupt_waits()
        shows(kind, error, traceback)

    sys.excepthook = show
