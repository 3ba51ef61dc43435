"""Check what attention was asked for, and say what to do where it cannot."""

import dataclasses
import operator
from typing import TYPE_CHECKING, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import Kernel
from jaxcomm.attention.kernels.scores import LEAST_BIAS
from jaxcomm.attention.kernels.selection import kernels_for
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.permutation import permute, take
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.communicator.lane import check_lane
from jaxcomm.primitives.arguments import flag

_LARGEST_NUMBER = float(np.finfo(np.float32).max)
# Scores are divided by it, in float32.
_LARGEST_CAP = 1e30

if TYPE_CHECKING:
    Array = jax.Array | np.ndarray


class Keywords(TypedDict, total=False):
    """The options that both functions have, for their overloads."""

    is_causal: bool
    scale: float | None
    local_window_size: int | tuple[int, int] | None
    sinks: "Array | None"
    logits_soft_cap: float | None
    alibi_slopes: "Array | None"
    dropout: "tuple[float, Array | None] | None"
    strategy: str | Strategy
    implementation: str | Kernel | None


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a call was asked for besides arrays, checked: Python values.

    Attributes:
      what: the function that was called, for messages.
      window: how far a query sees to the left and to the right; None if all the way.
      scale: factor on the scores. If None, ``1 / sqrt(H)``.
      soft_cap, dropout_rate, strategy, lane, backend: as in ``ring_attention``.
      kernels: those that may compute it, in the order of choice.
      has_residual: whether to return the log-sum-exp as well.
    """

    what: str
    window: tuple[int | None, int | None]
    scale: float | None
    soft_cap: float | None
    dropout_rate: float
    strategy: str | Strategy
    has_residual: bool
    kernels: tuple[Kernel, ...]
    lane: str | None
    backend: str | None

    @classmethod
    def of(
        cls, what: str, *, is_causal, scale, local_window_size, logits_soft_cap,
        dropout, strategy, return_residual, implementation, lane, backend,
    ) -> "AttentionOptions":  # fmt: skip
        """Check what a user gave.

        Raises:
          TypeError: a value is of another type.
          ValueError: a value is out of range, or a name is unknown.
        """
        is_causal = flag(is_causal, f"{what}: is_causal")
        return_residual = flag(return_residual, f"{what}: return_residual")
        if lane is not None:
            check_lane(lane, f"{what}: lane")
        if scale is not None:
            advice = "Pass a float, or scale=1.0 and multiply query by the scale."
            scale = number(scale, f"{what}: scale", advice)
        return cls(
            what,
            window_of(local_window_size, is_causal, what),
            scale,
            _soft_cap(logits_soft_cap, what),
            _rate_of(dropout, what),
            strategy,
            return_residual,
            kernels_for(implementation, what),
            lane,
            backend,
        )


def batched(what: str, query, key, value) -> tuple[bool, dict]:
    """Give query, key and value a batch dimension if they have none.

    Returns:
      (had_batch, arrays): whether they had one, and the arrays in 4 dimensions.
    """
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    found = {x.ndim for x in arrays.values()}
    if found == {4}:
        return True, arrays
    if found == {3}:
        return False, {name: x[None] for name, x in arrays.items()}
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    raise ValueError(
        f"{what}: {shapes}. Pass 4 dimensions each (batch, tokens, heads, head size), "
        "or 3 each, without the batch."
    )


def check_axes(axes: tuple, what: str) -> None:
    """Raise ValueError if they are axes of a mesh and of ``jax.vmap``, and types count.

    JAX's types name axes of the mesh alone.
    """
    of_mesh = set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes)
    if of_mesh and of_mesh != set(axes) and compat.checks_varying_axes():
        raise ValueError(
            f"{what}: axis_name={axes} names axes of the mesh, {sorted(of_mesh)}, and "
            "of jax.vmap, which JAX has no type for together. Pass check_vma=False to "
            "jax.shard_map."
        )


def check_are_local(what: str, **arrays) -> None:
    """Raise ValueError if types say that an array is split further.

    They do not follow the reshapes of attention, nor of its gradient.
    """
    for name, x in arrays.items():
        sharding = compat.explicit_sharding(x)
        if sharding is not None and any(sharding.spec):
            raise ValueError(
                f"{what}: {name} is {jax.typeof(x)}, split by Explicit axes that this "
                "jax.shard_map leaves out. Name all axes of the mesh in axis_names of "
                "the shard_map, or make the others Auto."
            )


def check_are_split(what: str, axes: tuple, **arrays) -> None:
    """Raise ValueError if types say that ranks hold equal keys or values.

    Each would be seen once for each rank.
    """
    if not compat.checks_varying_axes():
        return
    for name, x in arrays.items():
        varying = compat.varying_axes(x)
        lacking = [
            axis
            for axis in axes
            if axis in jax.sharding.get_abstract_mesh().manual_axes
            and axis not in varying
            and jax.lax.axis_size(axis) > 1
        ]
        if lacking:
            raise ValueError(
                f"{what}: {name} is equal on all ranks of {lacking}, by its type "
                f"{jax.typeof(x)}, so each of its tokens would count once for each "
                f"rank. Split its tokens over {axes} by in_specs of jax.shard_map, or "
                "attend on one device. If every rank is to have a copy of its own, "
                f"pass jaxcomm.pcast({name}, {axes}, to='varying')."
            )


def check_arrays(what: str, query, key, value) -> None:
    """Check shapes and dtypes of the arrays.

    Args:
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
    """
    named = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in named.items())
    for argument, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{what}: {argument} has dtype {x.dtype}. Pass a floating dtype."
            )
    if not query.shape[3] or not value.shape[3]:
        raise ValueError(
            f"{what}: the head size is 0 ({found}). Pass heads of one or more."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"{what}: dtypes differ ({found}). Cast them to one dtype.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{what}: key and value differ in shape ({found}). Only their head sizes "
            "may differ."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{what}: batch or head size differ ({found}). Dimensions 0 and 3 of "
            "query and key must be equal."
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{what}: {heads} query heads are not a multiple of {key_heads} "
            f"key heads ({found}). Each key head serves an equal group of query heads."
        )


def number(found, what: str, advice: str = "Pass a float.") -> float:
    """Return a Python float."""
    try:
        if isinstance(found, (str, bytes, bool)):  # of which float() makes a number
            raise TypeError
        asked = float(found)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}={found!r} is not a Python number. {advice}") from error
    if not abs(asked) <= _LARGEST_NUMBER:
        raise ValueError(f"{what}={asked} is not finite in float32. {advice}")
    return asked


def _soft_cap(cap: float | None, what: str) -> float | None:
    """Return the bound on the scores, positive or None."""
    if cap is None:
        return None
    cap = number(cap, f"{what}: logits_soft_cap")
    if not 0 < cap <= _LARGEST_CAP:
        raise ValueError(
            f"{what}: logits_soft_cap={cap}. Pass a positive number up to "
            f"{_LARGEST_CAP:g}, or None."
        )
    return cap


def _rate_of(dropout, what: str) -> float:
    """Return the dropout rate, for which there must be a key."""
    if dropout is None:
        return 0.0
    if not isinstance(dropout, (tuple, list)) or len(dropout) != 2:
        raise TypeError(
            f"{what}: dropout={dropout!r} is no pair. Pass the rate and a key of "
            "jax.random, such as (0.1, jax.random.key(0))."
        )
    rate, key = dropout
    rate = number(rate, f"{what}: the rate of dropout")
    if not 0 <= rate < 1:
        raise ValueError(
            f"{what}: dropout=({rate}, ...). Pass a rate of 0 or more, below 1."
        )
    if rate and key is None:
        raise ValueError(
            f"{what}: dropout=({rate}, None). Pass a key of jax.random, the same on "
            "all ranks that share a sequence."
        )
    return rate


def seeds_of(dropout, query, what: str):
    """Return uint32 numbers, one for each row and head of queries, from the key."""
    _, key = dropout
    *rows, _, heads, _ = query.shape
    try:
        data = jnp.asarray(key)
        if not jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
            data = jax.random.wrap_key_data(data)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: dropout=(..., {key!r}) has no key. Pass one key of jax.random, "
            "the same on all ranks that share a sequence."
        ) from error
    if data.ndim:
        raise ValueError(
            f"{what}: the key of dropout is an array of keys of shape {data.shape}. "
            "Pass one key, the same on all ranks that share a sequence."
        )
    return jax.random.bits(data, (*(rows or [1]), heads), jnp.uint32)


def window_of(
    local_window_size, is_causal: bool, name: str
) -> tuple[int | None, int | None]:
    """Return how far a query sees to the left and to the right; None if all the way.

    >>> window_of((3, 2), is_causal=False, name="ring_attention")
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


def bias_of(bias, mask, shape, key_layout: Layout, what: str):
    """Return bias and mask as one bias with its columns in rank order, or None.

    Args:
      bias: floating, at most 4 dimensions, or None.
      mask: bool, at most 4 dimensions, or None: what is not seen.
      shape: (B, N, T, S): S counts all keys, in natural order and without padding.
      key_layout: of the keys.
    """
    bias, mask = (None if x is None else with_dimensions(x, 4) for x in (bias, mask))
    for name, found, kind in (("bias", bias, jnp.floating), ("mask", mask, jnp.bool_)):
        if found is None:
            continue
        if not jnp.issubdtype(found.dtype, kind):
            raise TypeError(
                f"{what}: {name} has dtype {found.dtype}. Pass "
                f"{'a floating dtype' if name == 'bias' else 'bool'}."
            )
        if found.ndim != 4 or any(
            a not in (1, b) for a, b in zip(found.shape, shape, strict=True)
        ):
            raise ValueError(
                f"{what}: {name} has shape {found.shape} on this rank, and does not "
                f"broadcast to {shape}: batch, heads, this rank's queries, and all "
                "keys in natural order without padding."
            )
    if mask is not None:
        nothing = jnp.zeros((), jnp.float32) if bias is None else bias
        if jnp.finfo(nothing.dtype).min >= LEAST_BIAS:  # as of float8_e4m3fn
            nothing = nothing.astype(jnp.float32)
        # Finite, for jax_debug_infs.
        bias = jnp.where(mask, nothing, jnp.finfo(nothing.dtype).min)
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


def check_heads(x, heads: int, name: str, what: str):
    """Return one floating number for each query head, (N,), or None."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{what}: {name} has dtype {x.dtype}. Pass a floating dtype.")
    if x.shape != (heads,):
        raise ValueError(
            f"{what}: {name} has shape {x.shape}. Pass one number for each of the "
            f"{heads} query heads."
        )
    return x
