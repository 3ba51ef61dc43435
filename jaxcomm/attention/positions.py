"""Compare the tokens that a rank holds with those that its layout says."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm import compat, config
from jaxcomm.attention import order
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import no_positions
from jaxcomm.attention.strategies.strategy import keep
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives.call import call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request

# In place of positions: of tokens that jaxcomm itself put into the layout.
TRUSTED = object()


def check_axis(layout: Layout, axis_name, what: str) -> None:
    """Raise NameError or ValueError if an axis is not that of a layout."""
    axes = replica_groups.canonical_axes(axis_name)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"{what}: axis_name={axis_name!r} names "
            f"{'an axis twice' if axes else 'no axis'}. Pass each axis that splits "
            "the sequence once."
        )
    compat.check_axes_bound(axes, what)
    size = jax.lax.axis_size(axes)
    if size != layout.size:
        raise ValueError(
            f"{what}: the layout is of {layout.size} ranks, and axis {axis_name!r} "
            f"has {size}. Reorder the sequence with a layout of size={size}."
        )


def layout_of_ranks(
    tokens: Tokens, axis_name, what: str, argument: str, of_all: bool = True
) -> Layout:
    """Return the layout of tokens; order that is data is gathered from the ranks.

    Args:
      of_all: if False, the order is that of this rank: see ``order``.
    """
    layout = tokens.layout
    if not isinstance(layout.order, jax.ShapeDtypeStruct):
        return layout
    if tokens.positions is None:
        raise TypeError(f"{what}: {no_positions(layout.schedule, argument)}")
    held = jnp.asarray(tokens.positions)
    if held.ndim == 2 and not layout.differs_by_row:
        # All rows have the same: see are_right.
        held = held[0] if len(held) else jnp.zeros(held.shape[1:], held.dtype)
    found = order.of_rank(layout, held)
    return order.of_all(found, axis_name) if of_all else found


def are_right(tokens: Tokens, layout: Layout, axis_name, what: str, argument="tokens"):
    """Say whether this rank holds the tokens that the layout says.

    The ``host`` backend raises on all ranks where one of them does not. No other can: a
    GPU's host does not see what is on the device. With ``JAXCOMM_CHECK=1`` a callback
    raises there too.

    Args:
      tokens: of this rank. Their positions may be None, if the layout is the natural
        order, or TRUSTED.

    Returns:
      bool scalar, or None where there is nothing to compare.
    """
    positions = tokens.positions
    if positions is None and not layout.is_natural:
        raise TypeError(f"{what}: {no_positions(layout.schedule, argument)}")
    if positions is None or positions is TRUSTED:
        return None
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"{what}: {argument}.positions has dtype {positions.dtype}. Pass the "
            "tokens that layout.reorder returned."
        )
    expected = order.held(layout, jax.lax.axis_index(axis_name))
    expected = jnp.asarray(expected)
    expected = jnp.where(expected < layout.length, expected, PADDING)
    shape = positions.shape
    fits = len(shape) in (1, 2) and shape[-1:] == expected.shape[-1:]
    if not fits or (expected.ndim == 2 and shape != expected.shape):
        raise ValueError(
            f"{what}: {argument}.positions has shape {shape} on this rank, and "
            f"{expected.shape} is expected, or a row of it for each sequence. Split "
            "what layout.reorder returned as the batch is."
        )
    is_taken = isinstance(tokens.layout.order, jax.ShapeDtypeStruct)
    if is_taken and (layout.differs_by_row or positions.size == shape[-1]):
        # The order of the layout is these positions: see layout_of_ranks.
        return None
    found = positions.astype(jnp.int32).reshape(-1)
    expected = jnp.broadcast_to(expected, shape).reshape(-1)
    mistake = _first_mistake(found, expected, shape[-1])
    mistake = Request(CHECK_POSITIONS, mistake, call_of(what, axis_name)).run()
    is_right = mistake[0] < 0
    if config.check():
        _raise_everywhere(what, mistake, axis_name)
    return is_right


def all_are_right(queries, keys, axis_name, what: str):
    """Say whether this rank holds the queries and the keys that their layouts say.

    Args:
      queries, keys: tokens and layout of each. None for the keys if they are the same
        tokens as the queries.

    Returns:
      bool scalar, or None where there is nothing to compare. A policy of
      ``jax.checkpoint`` can save it.
    """
    tokens, layout = queries
    found = [are_right(tokens, layout, axis_name, what)]
    if keys is not None:
        tokens, layout = keys
        found.append(are_right(tokens, layout, axis_name, what, "key_tokens"))
    found = [is_right for is_right in found if is_right is not None]
    return keep(functools.reduce(jnp.logical_and, found)) if found else None


def _first_mistake(found, expected, tokens: int):
    """Return int32 (3,): the first wrong token or -1, its position, the right one."""
    if not found.size:
        return jnp.array([-1, 0, 0], jnp.int32)
    is_wrong = found != expected
    at = jnp.argmax(is_wrong).astype(jnp.int32)
    token = jnp.where(is_wrong[at], at % tokens, -1)
    return jnp.stack([token, found[at], expected[at]])


def _raise_everywhere(what: str, mistake, axis_name) -> None:
    """Raise by a callback on all ranks: those that went on would wait for the rest."""
    mistakes = all_gather(mistake, axis_name)
    rank = jnp.argmax(mistakes[:, 0] >= 0)

    def complain(rank, token, found, expected):
        if token < 0:  # jax.vmap runs both branches of the cond below
            return
        raise ValueError(
            f"{what}: rank {rank} does not hold the tokens that its layout says: token "
            f"{token} has position {found}, and the layout says {expected} (-1 is "
            "padding). Pass the tokens that came with this batch: `batch, tokens = "
            "layout.reorder(batch)`."
        )

    def call(rank, mistake):
        jax.debug.callback(complain, rank, *mistake)

    is_wrong = mistakes[rank, 0] >= 0
    jax.lax.cond(is_wrong, call, lambda *_: None, rank, mistakes[rank])


class CheckPositions(Collective):
    """Operand and result: int32 (3,), see :func:`_first_mistake`. Nothing moves."""

    name = "check_positions"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, call):
        return list(xs)


CHECK_POSITIONS = CheckPositions()
define(CHECK_POSITIONS)
