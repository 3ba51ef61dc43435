"""Checksums of what collectives take and give: save those of two runs, and compare."""

from jaxcomm.diagnostics.checksums import save as save
from jaxcomm.diagnostics.compare_runs import compare as compare

__all__ = ["compare", "save"]


def __dir__() -> list[str]:
    """Show the public names alone."""
    return __all__
