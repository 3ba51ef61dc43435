"""Kernels of recurrent layers, for ``state_scan``, and what one's own is."""

from jaxcomm.attention.state.causal_halo import causal_halo as causal_halo
from jaxcomm.attention.state.kernel import StateKernel as StateKernel
from jaxcomm.attention.state.kernel import StateRows as StateRows
from jaxcomm.attention.state.layers import GatedDelta as GatedDelta
from jaxcomm.attention.state.layers import KimiDelta as KimiDelta
from jaxcomm.attention.state.layers import Mamba2 as Mamba2
from jaxcomm.attention.state.maps import StateMap as StateMap

__all__ = [
    "GatedDelta",
    "KimiDelta",
    "Mamba2",
    "StateKernel",
    "StateMap",
    "StateRows",
    "causal_halo",
]


def __dir__() -> list[str]:
    """Show the public names alone."""
    return __all__
