"""Check what ring_attention was asked for, and say what to do where it cannot."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.permutation import permute, take

_NAME = "ring_attention"
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
# Scores are divided by it, in float32.
_LARGEST_CAP = 1e30


def batched(arrays: dict, name: str = _NAME) -> tuple[bool, dict]:
    """Give the arrays a batch dimension if they have none.

    Args:
      arrays: query, key and value.
      name: of the function that was called.

    Returns:
      (had_batch, arrays): whether they had one, and the arrays in 4 dimensions.

    Raises:
      ValueError: they have neither 4 nor 3 dimensions, or not all the same.
    """
    arrays = {key: jnp.asarray(x) for key, x in arrays.items()}
    found = {x.ndim for x in arrays.values()}
    if found == {4}:
        return True, arrays
    if found == {3}:
        return False, {key: x[None] for key, x in arrays.items()}
    shapes = ", ".join(f"{key} {x.shape}" for key, x in arrays.items())
    raise ValueError(
        f"{name}: {shapes}. Pass 4 dimensions each (batch, tokens, heads, head size), "
        "or 3 each, without the batch."
    )


def check_axes(axes: tuple) -> None:
    """Raise ValueError if they are axes of a mesh and of ``jax.vmap``, and types count.

    JAX's types name axes of the mesh alone.
    """
    of_mesh = set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes)
    if of_mesh and of_mesh != set(axes) and compat.checks_varying_axes():
        raise ValueError(
            f"{_NAME}: axis_name={axes} names axes of the mesh, {sorted(of_mesh)}, and "
            "of jax.vmap, which JAX has no type for together. Pass check_vma=False to "
            "jax.shard_map."
        )


def check_are_local(**arrays) -> None:
    """Raise ValueError if types say that an array is split further.

    They do not follow the reshapes of attention, nor of its gradient.
    """
    for name, x in arrays.items():
        sharding = compat.explicit_sharding(x)
        if sharding is not None and any(sharding.spec):
            raise ValueError(
                f"{_NAME}: {name} is {jax.typeof(x)}, split by Explicit axes that this "
                "jax.shard_map leaves out. Name all axes of the mesh in axis_names of "
                "the shard_map, or make the others Auto."
            )


def check_arrays(query, key, value, name: str = _NAME) -> None:
    """Check shapes and dtypes of the arrays.

    Args:
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
      name: of the function that was called.

    Raises:
      TypeError: a dtype is not floating, or dtypes differ.
      ValueError: the shapes do not fit together.
    """
    named = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{what} {x.shape} {x.dtype}" for what, x in named.items())
    for argument, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name}: {argument} has dtype {x.dtype}. Pass a floating dtype."
            )
    if not query.shape[3] or not value.shape[3]:
        raise ValueError(
            f"{name}: the head size is 0 ({found}). Pass heads of one or more."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"{name}: dtypes differ ({found}). Cast them to one dtype.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{name}: key and value differ in shape ({found}). Only their head sizes "
            "may differ."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{name}: batch or head size differ ({found}). Dimensions 0 and 3 of "
            "query and key must be equal."
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{name}: {heads} query heads are not a multiple of {key_heads} "
            f"key heads ({found}). Each key head serves an equal group of query heads."
        )


def check_layout(layout, shape, what: str, argument: str) -> Layout:
    """Return the layout if a rank's tokens are as many as it says.

    Args:
      layout: as given.
      shape: (B, T, ...), of what the rank has.
      what: whose they are, ``"query"`` or ``"key"``.
      argument: what the layout is called.

    Raises:
      TypeError: it is no layout.
      ValueError: the numbers differ.
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{_NAME}: {argument}={layout!r} is no layout. Pass jaxcomm.Layout("
            "schedule, size, length), with which the sequence was reordered."
        )
    batch, tokens = shape[:2]
    rows = None if layout.is_static else layout.order.shape[:-2]
    if rows and rows[0] != batch:
        raise ValueError(
            f"{_NAME}: {what} has {batch} sequences on this rank, and {argument} is of "
            f"{rows[0]}. Split the layout over the axis that splits the batch."
        )
    if tokens != layout.local_length:
        raise ValueError(
            f"{_NAME}: {what} has {tokens} tokens on this rank, and {argument} gives "
            f"each of its {layout.size} ranks {layout.local_length} of {layout.length}."
            f" Reorder {what} with the layout that is passed as {argument}; or check "
            "that dimension 1 counts tokens and is split over the axis alone."
        )
    return layout


def check_scale(scale: float | None, head_size: int) -> float:
    """Return the factor on the scores, ``1 / sqrt(head_size)`` by default.

    Raises:
      TypeError: ``scale`` is traced or is not a number.
    """
    if scale is None:
        return head_size**-0.5
    return check_number(
        scale, "scale", "Pass a float, or scale=1.0 and multiply query by the scale."
    )


def check_number(found, what: str, advice: str = "Pass a float.") -> float:
    """Return a Python float.

    Raises:
      TypeError: it is traced or is not a number.
      ValueError: it is not finite in float32.
    """
    try:
        if isinstance(found, (str, bytes, bool)):  # of which float() makes a number
            raise TypeError
        number = float(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{_NAME}: {what}={found!r} is not a Python number. {advice}"
        ) from error
    if not abs(number) <= _LARGEST_NUMBER:
        raise ValueError(f"{_NAME}: {what}={number} is not finite in float32. {advice}")
    return number


def check_soft_cap(cap: float | None) -> float | None:
    """Return the bound on the scores, positive or None."""
    if cap is None:
        return None
    cap = check_number(cap, "logits_soft_cap")
    if not 0 < cap <= _LARGEST_CAP:
        raise ValueError(
            f"{_NAME}: logits_soft_cap={cap}. Pass a positive number up to "
            f"{_LARGEST_CAP:g}, or None."
        )
    return cap


def check_dropout(rate: float, key) -> float:
    """Return the dropout rate, for which there must be a key."""
    rate = check_number(rate, "dropout_rate")
    if not 0 <= rate < 1:
        raise ValueError(f"{_NAME}: dropout_rate={rate}. Pass 0 or more, below 1.")
    if rate and key is None:
        raise ValueError(
            f"{_NAME}: dropout_rate={rate} without a dropout_key. Pass a key of "
            "jax.random, the same on all ranks that share a sequence."
        )
    return rate


def seeds_of(key, shape):
    """Return uint32 numbers of a shape, one for each row and head, from a key.

    Raises:
      TypeError: it is no key of ``jax.random``.
      ValueError: it is several keys.
    """
    try:
        data = jnp.asarray(key)
        if not jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
            data = jax.random.wrap_key_data(data)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{_NAME}: dropout_key={key!r} is no key. Pass one key of jax.random, the "
            "same on all ranks that share a sequence."
        ) from error
    if data.ndim:
        raise ValueError(
            f"{_NAME}: dropout_key is an array of keys of shape {data.shape}. Pass one "
            "key, the same on all ranks that share a sequence."
        )
    return jax.random.bits(data, shape, jnp.uint32)


def window_of(
    local_window_size, is_causal: bool, name: str = _NAME
) -> tuple[int | None, int | None]:
    """Return how far a query sees to the left and to the right; None if all the way.

    Args:
      local_window_size: None, an int for both, or a pair, as in ``jax.nn``.
      is_causal: whether it sees nothing to the right.
      name: of the function that was called.

    Raises:
      TypeError: it is none of these.
      ValueError: a number is negative.

    >>> window_of((3, 2), is_causal=False)
    (3, 2)
    """
    right = 0 if is_causal else None
    if local_window_size is None:
        return None, right
    asked = local_window_size
    pair = asked if isinstance(asked, (tuple, list)) else (asked, asked)
    try:
        if any(isinstance(each, bool) for each in pair):
            raise TypeError
        left, right = map(operator.index, pair)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: local_window_size={asked!r}. Pass an int, or a pair (left, "
            "right) of ints known when the program is traced."
        ) from error
    if left < 0 or right < 0:
        raise ValueError(
            f"{name}: local_window_size={asked!r}. Pass how many tokens are seen on "
            "each side, zero or more."
        )
    # Beyond the sequence a window is none; and sums of positions fit into 32 bits.
    return min(left, 2**30), (0 if is_causal else min(right, 2**30))


def mask_of(layout: Layout, key_layout: Layout, window) -> Mask:
    """Return the mask of a call."""
    left, right = window
    left = None if left is None or left >= layout.length else left
    right = None if right is None or right >= key_layout.length else right
    return Mask(left, right, layout.length, key_layout.length)


def bias_of(bias, mask, shape, key_layout: Layout):
    """Return bias and mask as one bias with its columns in rank order, or None.

    Args:
      bias: floating, at most 4 dimensions, or None.
      mask: bool, at most 4 dimensions, or None: what is not seen.
      shape: (B, N, T, S): S counts all keys, in natural order and without padding.
      key_layout: of the keys.

    Raises:
      TypeError: a dtype is another.
      ValueError: a shape does not broadcast.
    """
    bias, mask = (None if x is None else with_dimensions(x, 4) for x in (bias, mask))
    for what, found, kind in (("bias", bias, jnp.floating), ("mask", mask, jnp.bool_)):
        if found is None:
            continue
        if not jnp.issubdtype(found.dtype, kind):
            raise TypeError(
                f"{_NAME}: {what} has dtype {found.dtype}. Pass "
                f"{'a floating dtype' if what == 'bias' else 'bool'}."
            )
        if found.ndim != 4 or any(
            a not in (1, b) for a, b in zip(found.shape, shape, strict=True)
        ):
            raise ValueError(
                f"{_NAME}: {what} has shape {found.shape} on this rank, and does not "
                f"broadcast to {shape}: batch, heads, this rank's queries, and all "
                "keys in natural order without padding."
            )
    if mask is not None:
        nothing = jnp.zeros((), jnp.float32) if bias is None else bias
        bias = jnp.where(mask, nothing, -jnp.inf)
    if bias is None:
        return None
    bias = jnp.broadcast_to(bias, (*bias.shape[:3], shape[3]))
    with jax.named_scope("bias_in_rank_order"):
        return _in_rank_order(bias, key_layout)


def _in_rank_order(bias, layout: Layout):
    """Return the columns of a bias as the ranks hold them; zeros for padding."""
    positions = layout.all_positions()
    if isinstance(positions, np.ndarray):
        padding = [(0, 0)] * 3 + [(0, len(positions) - bias.shape[3])]
        return permute(jnp.pad(bias, padding), positions, 3)
    if positions.ndim == 2:  # of each sequence
        bias = jnp.broadcast_to(bias, (len(positions), *bias.shape[1:]))
    return take(bias, positions, 3)


def with_dimensions(x, count: int):
    """Return an array with as many dimensions, as it broadcasts; more stay."""
    x = jnp.asarray(x)
    return x.reshape((1,) * (count - x.ndim) + x.shape)


def check_heads(x, heads: int, what: str):
    """Return one floating number for each query head, (N,)."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{_NAME}: {what} has dtype {x.dtype}. Pass a floating dtype.")
    if x.shape != (heads,):
        raise ValueError(
            f"{_NAME}: {what} has shape {x.shape}. Pass one number for each of the "
            f"{heads} query heads."
        )
    return x
