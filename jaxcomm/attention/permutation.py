"""Arrays of tokens: permute them wherever they live, and number their documents."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.mask import PADDING
from jaxcomm.primitives import arguments

# Of tokens that are copied by slices: of more, one gather compiles sooner.
_MOST_RUNS = 256


def checked(leaf, axis, what: str):
    """Return an array and the index of its dimension ``axis``."""
    leaf = leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
    arguments.integer(axis, f"{what}: axis")
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"{what}: axis={axis} was asked for, but x has shape {leaf.shape}. Pass "
            "the axis that counts tokens."
        )
    return leaf, axis % leaf.ndim


def no_positions(schedule, argument: str = "tokens") -> str:
    """Say what to do about positions that a call did not get."""
    return (
        f"{argument} has no positions, and the layout {schedule!r} is not the natural "
        "order of the tokens. Reorder the batch with `batch, tokens = layout.reorder("
        "batch)`, split the tokens as the batch is, and pass this rank's."
    )


def take(leaf, places, axis: int, *, fill: int | None = 0):
    """Return the tokens at these places.

    Args:
      leaf: array whose dimension ``axis`` counts tokens.
      places: int32 (tokens,), or (B, tokens) for each row of dimension 0.
      fill: value at places behind the end. If None, what no result should be: see
        :func:`poison`.
    """
    if places.ndim == 2:
        return _take_rows(leaf, places, axis, fill)
    count = leaf.shape[axis]
    filling = poison(leaf.dtype) if fill is None else fill
    is_known = isinstance(places, np.ndarray)
    if is_known and np.array_equal(places, np.arange(count)):
        return leaf
    if isinstance(leaf, np.ndarray) and is_known:
        padding = [(0, 0)] * leaf.ndim
        padding[axis] = (0, max(0, int(places.max(initial=-1)) + 1 - count))
        padded = np.pad(leaf, padding, constant_values=filling)
        return np.take(padded, places, axis=axis)
    leaf = jnp.asarray(leaf)
    index = (slice(None),) * axis + (places,)
    return leaf.at[index].get(
        mode="fill",
        fill_value=filling,
        # Places behind the end may be equal.
        unique_indices=fill is not None,
        out_sharding=_sharding(leaf, axis, len(places)),
    )


def _take_rows(leaf, places, axis: int, fill):
    if isinstance(leaf, np.ndarray) and isinstance(places, np.ndarray):
        rows = zip(leaf, places, strict=True)
        return np.stack([take(row, at, axis - 1, fill=fill) for row, at in rows])
    return jax.vmap(lambda row, at: take(row, at, axis - 1, fill=fill))(
        jnp.asarray(leaf), jnp.asarray(places)
    )


def shifted(leaf, axis: int, by: int, ids, what: str):
    """Move what tokens hold to tokens before them, within documents.

    Args:
      leaf: array whose dimension ``axis`` counts tokens in natural order.
      by: how many positions.
      ids: int32, the document of each token, in the shape of the array up to ``axis``,
        negative for padding; or None.

    Returns:
      (array, none): of the same shape, and the number where there is no such token.
    """
    if jnp.issubdtype(leaf.dtype, jnp.signedinteger):
        none = -1
    elif jnp.issubdtype(leaf.dtype, jnp.inexact):
        none = 0
    else:
        raise TypeError(
            f"{what}: shift={by} of dtype {leaf.dtype}, which has no number "
            "for a token without a label. Pass int32, whose number is -1."
        )
    count = leaf.shape[axis]
    ahead = np.arange(count) + by
    moved = take(leaf, np.minimum(ahead, count), axis, fill=none)
    if ids is None:
        return moved, none
    # A document is a run of one id: no other is between.
    has_one = ids >= 0
    for step in range(1, min(by, count) + 1):
        at = np.minimum(np.arange(count) + step, count)
        has_one = has_one & (take(ids, at, axis, fill=PADDING) == ids)
    xp = np if isinstance(has_one, np.ndarray) else jnp
    has_one = has_one.reshape(has_one.shape + (1,) * (leaf.ndim - axis - 1))
    return xp.where(has_one, moved, np.asarray(none, leaf.dtype)), none


def permute(x, places: np.ndarray, axis: int):
    """Return the tokens at these places, each of which is named once.

    Its gradient is a permutation too. That of a gather is a scatter, which is slow.

    Args:
      x: array whose dimension ``axis`` counts tokens.
      places: int (tokens,), a permutation.
    """
    if np.array_equal(places, np.arange(len(places))):
        return x
    back = np.argsort(places)

    @jax.custom_vjp
    def permuted(x):
        return _permuted(x, places, axis)

    permuted.defvjp(
        lambda x: (_permuted(x, places, axis), None),
        lambda _, grad: (_permuted(grad, back, axis),),
    )
    return permuted(x)


def _permuted(x, places, axis: int):
    """Permute by copies of whole runs of tokens where there are few."""
    count, shape = len(places), x.shape
    step = int(places[1] - places[0])
    if step > 1 and count % step == 0:
        rows = np.arange(count).reshape(-1, step)
        if np.array_equal(places, rows.T.ravel()):  # dealt like cards, or collected
            x = x.reshape(*shape[:axis], *rows.shape, *shape[axis + 1 :])
            return jnp.swapaxes(x, axis, axis + 1).reshape(shape)
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    if len(runs) > _MOST_RUNS:
        return jnp.take(x, places, axis=axis, unique_indices=True, mode="clip")
    parts = [
        jax.lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=axis)
        for run in runs
    ]
    return jnp.concatenate(parts, axis)


def poison(dtype) -> float:
    """Return the value of a dtype that says that a number is none.

    NaN; the smallest number of signed integers and of floats without NaN, the largest
    of unsigned integers, and True: as JAX fills what is out of bounds.
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        has_nan = np.isnan(np.array(np.nan, dtype))
        return float("nan") if has_nan else float(jnp.finfo(dtype).min)
    if dtype == np.bool_:
        return True
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"Positions are compared with tokens of dtype {dtype}, which has no value "
            "for tokens that are in a wrong place. Pass numbers: of keys, "
            "jax.random.key_data(x)."
        )
    limits = jnp.iinfo(dtype)
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return int(limits.min if is_signed else limits.max)


def poison_unless(is_right, tree):
    """Replace every number of a pytree by :func:`poison` where a flag is False."""
    if is_right is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(is_right, x, poison(x.dtype)), tree)


def poison_both_ways(is_right, x):
    """Replace an array as :func:`poison_unless` does, and its gradient too.

    That of a selection would be zeros, with which a model trains on.
    """
    if is_right is None or not np.isnan(poison(x.dtype)):
        return poison_unless(is_right, x)
    if jnp.iscomplexobj(x):  # Of an infinity a complex product makes NaN.
        parts = (poison_both_ways(is_right, part) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    return x * jnp.where(is_right, 1, jnp.nan).astype(x.dtype)


def token_numbers(leaf, axis: int):
    """Return 0, 1, 2, ... along ``axis``: int32, of the array's shape up to there."""
    shape = leaf.shape[: axis + 1]
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.arange(shape[axis], dtype=np.int32), shape)
    sharding = compat.explicit_sharding(leaf)
    if sharding is not None:
        sharding = sharding.update(spec=jax.P(*sharding.spec[: axis + 1]))
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis, out_sharding=sharding)


def places_of(positions, length: int, has_rows: bool, what: str):
    """Return where each token of a sequence is, by the positions that are held.

    Args:
      positions: int32 (..., tokens), negative for padding.
      length: of the sequence.
      has_rows: whether rows may differ. Then there are two dimensions.

    Returns:
      int32 (length,), or (B, length); behind the end where the positions are not those
      of one such sequence, each once.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{what}: positions have dtype {positions.dtype}. Pass int32.")
    known = compat.known_value(positions)
    positions = _whole(jnp.asarray(positions)) if known is None else known
    xp = jnp if known is None else np
    held = positions.shape[-1]
    rows = positions.reshape(math.prod(positions.shape[:-1]), held)
    if not len(rows):  # of no sequence
        return np.zeros((0, length) if has_rows else length, np.int32)
    found = [_places_of_row(xp, row, length) for row in rows] if has_rows else []
    if not has_rows:
        places, is_right = _places_of_row(xp, rows[0], length)
        found = [(places, is_right & (rows == rows[:1]).all())]
    if known is not None and not all(is_right for _, is_right in found):
        raise ValueError(
            f"{what}: the positions are not those of a sequence of {length} tokens, "
            f"each once{'' if has_rows else ' and the same in all rows'}: "
            f"{np.array2string(known, threshold=8)}. Pass those that reorder "
            "returned with these tokens, of all ranks."
        )
    every = [xp.where(is_right, places, held) for places, is_right in found]
    return (xp.stack(every) if has_rows else every[0]).astype(np.int32)


def _places_of_row(xp, row, length: int):
    """Return the places, and whether each position is there once and no other is."""
    order = xp.argsort(xp.where(row < 0, length, row), stable=True)
    places = order[:length]
    every = xp.arange(length, dtype=row.dtype)
    is_right = (row[places] == every).all() & (row < length).all()
    return places, is_right


def _whole(x):
    """Return an array of which each device of an explicit mesh has all."""
    sharding = compat.explicit_sharding(x)
    if sharding is None:
        return x
    return jax.reshard(x, sharding.update(spec=jax.P(*[None] * x.ndim)))


def _sharding(leaf, axis: int, count: int):
    """Return the sharding to keep on a mesh with explicit axes; None on others."""
    sharding = compat.explicit_sharding(leaf)
    if sharding is None:
        return None
    spec = list(sharding.spec) + [None] * (leaf.ndim - len(sharding.spec))
    names = spec[axis]
    if names is not None:
        names = names if isinstance(names, tuple) else (names,)
        parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
        if count % parts:
            spec[axis] = None
    return sharding.update(spec=jax.P(*spec))


def checked_order(order, size: int, length: int):
    """Return the order of a layout as int32, if each token is there once."""
    if order is None:
        return None
    if not compat.is_tracer(order) and not isinstance(order, jax.Array):
        order = np.asarray(order)
    if not jnp.issubdtype(order.dtype, jnp.integer):
        raise TypeError(
            f"Layout: order has dtype {order.dtype}. Pass the positions that each of "
            f"the {size} ranks holds, int32."
        )
    shape = order.shape
    if len(shape) not in (2, 3) or shape[-2] != size or size * shape[-1] < length:
        raise ValueError(
            f"Layout: order has shape {shape}, for {length} tokens on {size} ranks. "
            "Pass (ranks, tokens of a rank), or (batch, ranks, tokens of a rank), with "
            "room for all tokens."
        )
    known = compat.known_value(order)
    if known is not None:
        held = size * shape[-1]
        for row in known.reshape(math.prod(shape[:-2]), held):
            if not np.array_equal(np.sort(row), np.arange(held)):
                raise ValueError(
                    f"Layout: order has {np.array2string(row, threshold=8)}, and each "
                    f"of 0 to {held - 1} is expected once. Pass the position of each "
                    f"token that a rank holds; padding has those from {length} on."
                )
    return order if order.dtype == np.int32 else order.astype(np.int32)


_INT32 = jnp.iinfo(jnp.int32)


def ids_of(x, what: str):
    """Return document ids as int32; arrays of other types as they are."""
    if not _is_wide(x):
        return x
    known = compat.known_value(x)
    if known is None:
        raise TypeError(
            f"{what} has dtype {x.dtype}, and int32 may not hold its numbers. Number "
            "the documents of a batch from 0, and pass int32."
        )
    # Cut to 32 bits, two documents could become one, or padding.
    for number in (int(known.min(initial=0)), int(known.max(initial=0))):
        if not _INT32.min <= number <= _INT32.max:
            raise ValueError(
                f"{what} has the number {number}, which int32 does not hold. Number "
                "the documents of a batch from 0, and pass int32."
            )
    return known.astype(np.int32)


def _lengths_of(x):
    """Return lengths as int32, the largest for all beyond it; others as they are."""
    if not _is_wide(x):
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    low = max(_INT32.min, int(jnp.iinfo(x.dtype).min))
    return xp.clip(x, low, _INT32.max).astype(xp.int32)


def _is_wide(x) -> bool:
    """Say whether an array is of integers that int32 does not hold."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        return False
    return jnp.iinfo(dtype).max > _INT32.max


def natural_ids(ids, lengths, numbers, what: str, whose: str = ""):
    """Return the documents of tokens in natural order, padding included, or None.

    Args:
      ids: integers (..., T) or (T,), or None.
      lengths: integers (...), or one; or None: tokens from there on are padding.
      numbers: int32 (..., T), the position of each token.
      whose: the beginning of the name of the argument ``lengths``, as ``"query_"``.

    Returns:
      int32 of the shape of ``numbers``; a numpy array if all are.
    """
    if ids is None and lengths is None:
        return None
    shape = numbers.shape
    named = (
        ("segment_ids", ids, (shape, shape[-1:])),
        (f"{whose}seq_lengths" if whose else "lengths", lengths, (shape[:-1], ())),
    )
    found = []
    for name, x, shapes in named:
        x = x if x is None or isinstance(x, jax.Array) else np.asarray(x)
        is_ids = name == "segment_ids"
        x = ids_of(x, f"{what}: {name}") if is_ids else _lengths_of(x)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{what}: {name} has dtype {x.dtype}. Pass integers.")
        if x is not None and x.shape not in shapes:
            raise ValueError(
                f"{what}: {name} has shape {x.shape}. Pass {shapes[0]} or {shapes[1]}, "
                f"for tokens of shape {shape} in their natural order."
            )
        found.append(None if x is None else x.astype(np.int32))
    ids, lengths = found
    known = np.ndarray, np.generic, type(None)
    is_known = all(isinstance(x, known) for x in (*found, numbers))
    xp = np if is_known else jnp
    ids = xp.zeros(shape, np.int32) if ids is None else xp.broadcast_to(ids, shape)
    if not is_known:
        ids = _split_as(numbers, ids)
    if lengths is None:
        return ids
    ends = xp.broadcast_to(xp.asarray(lengths)[..., None], shape)
    if not is_known:
        ends = _split_as(numbers, ends)
    return xp.where(numbers < ends, ids, np.int32(PADDING))


def _split_as(numbers, x):
    """Split an array as the tokens are, where types say how arrays are split."""
    sharding = compat.explicit_sharding(numbers)
    return x if sharding is None else jax.reshard(x, sharding)
