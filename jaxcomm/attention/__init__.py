"""Attention over a sequence that is split across devices."""

from jaxcomm import renamed
from jaxcomm.attention import kernels as kernels
from jaxcomm.attention import state as state
from jaxcomm.attention.combine import combine as combine
from jaxcomm.attention.comparison import compare_strategies as compare_strategies
from jaxcomm.attention.documents import document_layout as document_layout
from jaxcomm.attention.documents import segment_ids_of as segment_ids_of
from jaxcomm.attention.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from jaxcomm.attention.mask import Ranges as Ranges
from jaxcomm.attention.relayout import relayout as relayout
from jaxcomm.attention.ring_attention import attention_fn as attention_fn
from jaxcomm.attention.ring_attention import ring_attention as ring_attention
from jaxcomm.attention.ring_attention import save_attention as save_attention
from jaxcomm.attention.state.state_scan import state_scan as state_scan
from jaxcomm.attention.strategies.ulysses import Ulysses as Ulysses

__all__ = [
    "Ranges",
    "Ulysses",
    "attention_fn",
    "combine",
    "compare_strategies",
    "document_layout",
    "kernels",
    "relayout",
    "save_attention",
    "segment_ids_of",
    "state",
    "state_scan",
]
__getattr__ = renamed.looked_up("jaxcomm.attention")


def __dir__() -> list[str]:
    """Show the public names alone."""
    return __all__
