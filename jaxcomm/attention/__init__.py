"""Attention over a sequence that is split across devices."""

from jaxcomm.attention.adapters import attention_fn as attention_fn
from jaxcomm.attention.adapters import equinox_attention as equinox_attention
from jaxcomm.attention.adapters import save_attention as save_attention
from jaxcomm.attention.combine import combine as combine
from jaxcomm.attention.comparison import Comparison as Comparison
from jaxcomm.attention.comparison import compare_strategies as compare_strategies
from jaxcomm.attention.documents import document_layout as document_layout
from jaxcomm.attention.documents import document_work as document_work
from jaxcomm.attention.documents import segment_ids as segment_ids
from jaxcomm.attention.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from jaxcomm.attention.kernels.kernel import Grads as Grads
from jaxcomm.attention.kernels.kernel import Hop as Hop
from jaxcomm.attention.kernels.kernel import Kernel as Kernel
from jaxcomm.attention.kernels.kernel import Saved as Saved
from jaxcomm.attention.kernels.selection import kernels_of as kernels_of
from jaxcomm.attention.layout import Tokens as Tokens
from jaxcomm.attention.mask import Block as Block
from jaxcomm.attention.mask import Coordinates as Coordinates
from jaxcomm.attention.mask import Mask as Mask
from jaxcomm.attention.relayout import relayout as relayout
from jaxcomm.attention.ring_attention import ring_attention as ring_attention
from jaxcomm.attention.schedules import Schedule as Schedule
from jaxcomm.attention.state.causal_halo import causal_halo as causal_halo
from jaxcomm.attention.state.delta import GatedDelta as GatedDelta
from jaxcomm.attention.state.delta import KimiDelta as KimiDelta
from jaxcomm.attention.state.kernel import StateKernel as StateKernel
from jaxcomm.attention.state.kernel import StateRows as StateRows
from jaxcomm.attention.state.mamba2 import Mamba2 as Mamba2
from jaxcomm.attention.state.maps import StateMap as StateMap
from jaxcomm.attention.state.state_scan import state_scan as state_scan
from jaxcomm.attention.strategies.strategy import Strategy as Strategy
from jaxcomm.attention.strategies.ulysses import Ulysses as Ulysses
from jaxcomm.attention.strategies.ulysses import Usp as Usp

__all__ = [
    "Block",
    "Comparison",
    "Coordinates",
    "GatedDelta",
    "Grads",
    "Hop",
    "Kernel",
    "KimiDelta",
    "Mamba2",
    "Mask",
    "Saved",
    "Schedule",
    "StateKernel",
    "StateMap",
    "StateRows",
    "Strategy",
    "Tokens",
    "Ulysses",
    "Usp",
    "attention_fn",
    "causal_halo",
    "combine",
    "compare_strategies",
    "document_layout",
    "document_work",
    "dot_product_attention",
    "equinox_attention",
    "kernels_of",
    "relayout",
    "ring_attention",
    "save_attention",
    "segment_ids",
    "state_scan",
]


def __dir__() -> list[str]:
    """Show the public names alone."""
    return __all__
