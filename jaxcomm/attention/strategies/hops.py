"""What the hops of a ring have in common, and which kernels may compute them."""

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.hop import Hop
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import Coordinates
from jaxcomm.attention.strategies.strategy import Call, Inputs
from jaxcomm.attention.visibility import (
    blocks_of,
    own_block,
    runs_of_others,
    runs_of_own,
)

_EXCHANGED = "ranks exchange heads around a ring"


def own_hop(call: Call, inputs: Inputs, width: int = 1) -> Hop:
    """Return the hop of a rank's own keys, and the kernels that may compute it.

    Args:
      call, inputs: of the ring.
      width: as that of :class:`Ring`.

    Raises:
      ValueError: the kernel that was asked for cannot compute it.
    """
    hop, layouts = _known(call, inputs, width), _layouts(inputs)
    if width > 1:
        return narrowed(hop, _EXCHANGED)
    held = layouts[0].size * layouts[0].local_length
    # Padding is told by its segment ids alone.
    if call.is_self and (call.mask.query_length == held or inputs.key_ids is not None):
        hop = hop.replace(runs=runs_of_own(layouts[0]))
    blocks = own_block(*layouts, call.mask, inputs.key.shape[1])
    return narrowed(hop, blocks if isinstance(blocks, str) else (blocks,))


def hop_of_others(call: Call, inputs: Inputs, width: int) -> Hop:
    """Return what the hops of other ranks' keys have in common; as :func:`own_hop`.

    Its blocks are those of earlier ranks and of later ones.
    """
    hop = _known(call, inputs, width)
    if width > 1:
        return narrowed(hop, _EXCHANGED)
    layouts = _layouts(inputs)
    if call.is_self and inputs.key_ids is not None:
        hop = hop.replace(runs=runs_of_others(*layouts))
    blocks = blocks_of(*layouts, call.mask, inputs.key.shape[1])
    if isinstance(blocks, str):
        return narrowed(hop, blocks)
    return narrowed(hop, tuple(dict.fromkeys((blocks.earlier, blocks.later))))


def _layouts(inputs: Inputs):
    return inputs.query_layout, inputs.key_layout


def _known(call: Call, inputs: Inputs, width: int) -> Hop:
    """Return what all hops have in common."""
    layouts, count = _layouts(inputs), inputs.key.shape[1]

    def abstract(layout, ids):
        rows = () if layout.is_static else layout.order.shape[:-2]
        shape = (*rows, width * layout.local_length)
        return Coordinates(jax.ShapeDtypeStruct(shape, jnp.int32), ids)

    bias = inputs.bias
    if bias is not None:
        bias = jax.ShapeDtypeStruct((*bias.shape[:3], count), bias.dtype)
    return call.hop.replace(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        queries=abstract(layouts[0], inputs.query_ids),
        keys=abstract(layouts[1], inputs.key_ids),
        bias=bias,
        slopes=inputs.slopes,
        seeds=inputs.seeds,
        query_segments=layouts[0].segments * width,
        key_segments=layouts[1].segments * width,
    )
