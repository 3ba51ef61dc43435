"""The tokens before each token, wherever they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention import arguments
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import promotes_ranks
from jaxcomm.attention.on_ranks import vary_alike
from jaxcomm.attention.permutation import poison_both_ways
from jaxcomm.attention.positions import are_right, documents_of, held_tokens
from jaxcomm.attention.state.dealt import Dealt, checked_most, dealt_of
from jaxcomm.attention.state.fragments import Fragments
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.primitives.arguments import integer
from jaxcomm.primitives.call import SCOPE, AxisName, call_of

_WHAT = "causal_halo"
# Of no document, and no padding: before the first token.
_NOWHERE = -2


@promotes_ranks
def causal_halo(
    x: jax.Array | np.ndarray,
    axis_name: AxisName,
    tokens: Tokens | Layout,
    width: int,
    *,
    most_fragments: int = 8,
    lane: str | None = None,
    backend: str | None = None,
) -> Any:
    """Return the ``width`` tokens before each token, for short convolutions and shifts.

    For use inside ``jax.shard_map``, with the tokens of ``ring_attention``. The last
    ``width`` tokens of each fragment travel, in one all-gather. Documents do not leak:
    a document is a run of tokens of one segment id, and what is before it is 0.
    Differentiable as often as you like.

    Args:
      x: (B, T, ...) of any dtype, the tokens of this rank.
      axis_name: the mesh axis (or tuple of axes) over which the sequence is split.
      tokens: of this rank, as in ``ring_attention``: of the schedule ``"zigzag"``,
        ``"contiguous"`` or another whose fragments are few.
      width: how many tokens before each, one or more.
      most_fragments: as in :func:`state_scan`.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      (B, T, width, ...) of the dtype of ``x``: at ``[:, :, i]`` is the token ``i + 1``
      positions before. Zeros where there is none in the document, and of padding.

    Raises:
      ValueError: ``width`` is below one, shapes, tokens and axis do not fit together,
        or the layout deals too many fragments, as ``"striped"`` does.
      TypeError: ``width`` is no integer, or positions are missing.
      NameError: ``axis_name`` is not bound; call inside ``jax.shard_map``.

    A causal convolution of 4 taps for each channel, with weights (4, channels):

    >>> def convolve(x, weights, tokens):
    ...     before = causal_halo(x, "context", tokens, 3)
    ...     return x * weights[0] + jnp.einsum("btwc,wc->btc", before, weights[1:])
    """
    width = integer(width, f"{_WHAT}: width")
    if width < 1:
        raise ValueError(f"{_WHAT}: width={width}. Pass one token or more.")
    x = jnp.asarray(x)
    if x.ndim < 2:
        raise ValueError(
            f"{_WHAT}: x has shape {x.shape}. Pass (B, T, ...): sequences, then tokens."
        )
    named = call_of(_WHAT, axis_name, lane=lane, backend=backend)
    axis_name = named.axes[0] if len(named.axes) == 1 else named.axes
    arguments.check_axes(named.axes, _WHAT)
    arguments.check_are_local(_WHAT, x=x)
    with SCOPE(named.scope):
        tokens, layout = held_tokens(tokens, x, axis_name, _WHAT, "x", "tokens")
        ids, is_real = documents_of(tokens, layout, x.shape[:2], axis_name, _WHAT)
        is_right = are_right(tokens, layout, axis_name, _WHAT)
        if layout.is_static:
            x, ids, is_right = vary_alike((x, ids, is_right), named)
            fragments = Fragments.of(layout, 1, _WHAT)
            before = _shifted(x, fragments, layout, width, axis_name, 0)
            if ids is None:
                # Of one document: before it are zeros, and padding is behind it.
                real = jnp.ones((1, 1), bool) if is_real is None else is_real
                ids = real.astype(jnp.int32) - 1
                ids_before = [ids] * width
            else:
                ids_before = _shifted(
                    ids, fragments, layout, width, axis_name, _NOWHERE
                )
        else:
            most = checked_most(most_fragments, _WHAT)
            dealt, order = dealt_of(layout, ids, most, axis_name, _WHAT)
            assert ids is not None  # dealt_of refuses
            served = (dealt.fragment[..., -1] < most).all()
            is_right = served if is_right is None else is_right & served
            x, ids, is_right = vary_alike((x, ids, is_right), named)
            before, ids_before = _dealt(x, dealt, order, most, width, axis_name)
    found, is_same, last = [], ids >= 0, ids
    for each, of_each in zip(before, ids_before, strict=True):
        # A run of one id: no other between.
        is_same, last = is_same & (of_each == last), of_each
        seen = is_same.reshape(is_same.shape + (1,) * (x.ndim - 2))
        found.append(jnp.where(seen, each, jnp.zeros((), x.dtype)))
    return poison_both_ways(is_right, jnp.stack(found, 2))


def _shifted(x, fragments: Fragments, layout: Layout, width: int, axis_name, fill):
    """Return tokens 1, 2, ... ``width`` positions before, each (B, T, ...)."""
    bounds = fragments.bounds
    held = np.stack([np.asarray(layout.positions_of(r)) for r in range(layout.size)])
    tails, positions = [], []
    for start, stop in fragments.pairs:
        # A short fragment has fewer. The first of them stand in, and are not looked at.
        at = np.arange(stop - width, stop)
        is_there, at = at >= start, np.maximum(at, start)
        tails.append(x[:, at])
        positions.append(np.where(is_there, held[:, at], -1))
    # (ranks, F, width): where, among all tails, the tokens before each fragment are.
    positions = np.stack(positions, 1).reshape(-1)
    place = np.full(layout.size * layout.local_length, len(positions))
    place[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    wanted = held[:, list(bounds[:-1])][..., None] - np.arange(width, 0, -1)
    places = np.where(wanted >= 0, place[np.maximum(wanted, 0)], len(positions))
    every = all_gather(jnp.stack(tails, 1), axis_name)  # (ranks, B, F, width, ...)
    every = jnp.moveaxis(every, 1, 0)
    every = every.reshape(len(every), -1, *every.shape[4:])
    mine = jnp.asarray(places, jnp.int32)[jax.lax.axis_index(axis_name)]
    halo = jnp.take(every, mine, axis=1, mode="fill", fill_value=fill)
    wide = [
        jnp.concatenate([halo[:, which], x[:, start:stop]], 1)
        for which, (start, stop) in enumerate(fragments.pairs)
    ]
    return [
        jnp.concatenate([part[:, width - by : part.shape[1] - by] for part in wide], 1)
        for by in range(1, width + 1)
    ]


def _dealt(x, dealt: Dealt, order, most: int, width: int, axis_name):
    """Return what :func:`_shifted` does, of tokens that are dealt anywhere, and ids."""
    count, rank = x.shape[1], jax.lax.axis_index(axis_name)
    length = dealt.natural.shape[-1] - 2

    def tails(fragment, order):
        """Return the last tokens of each fragment of a rank: (F, width)."""
        real = (fragment == jnp.arange(most)[:, None]) & (order < length)
        last = jnp.where(real, jnp.arange(count), -1).max(1)
        return jnp.maximum(last[:, None] - jnp.arange(width), 0)

    at = jax.vmap(jax.vmap(tails))(dealt.fragment, jnp.minimum(order, length))
    mine = jax.vmap(lambda x, at: x[at[rank]])(x, at)  # (B, F, width, ...)
    every = jnp.moveaxis(all_gather(mine, axis_name), 1, 0)
    every = every.reshape(len(every), -1, *every.shape[4:])

    def one(x, every, at, order, natural):
        """Return tokens before each of a sequence, and ids, (width, T, ...)."""
        positions = jax.vmap(lambda order, at: order[at])(order, at).reshape(-1)
        # The place of each position among this rank's tokens and all tails.
        place = jnp.zeros(length + 1, jnp.int32)
        of_tails, mine = count + jnp.arange(len(positions)), jnp.arange(count)
        place = place.at[positions].set(of_tails.astype(jnp.int32))
        place = place.at[order[rank]].set(mine.astype(jnp.int32), mode="drop")
        wanted = order[rank] - jnp.arange(1, width + 1)[:, None]
        found = jnp.concatenate([x, every])[place[jnp.maximum(wanted, 0)]]
        return found, jnp.where(wanted < 0, _NOWHERE, natural[wanted])

    order = jnp.minimum(order, length)
    found, ids = jax.vmap(one)(x, every, at, order, dealt.natural)
    return jnp.moveaxis(found, 1, 0), jnp.moveaxis(ids, 1, 0)
