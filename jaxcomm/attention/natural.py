"""Check what dot_product_attention was asked for: arrays in their natural order."""

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention import segments
from jaxcomm.attention.arguments import batched, check_arrays, with_dimensions

_NAME = "dot_product_attention"
# Options of ring_attention that say where tokens are.
_OF_RANKS = ("key_layout", "key_positions", "layout", "positions")


def check_options(options) -> None:
    """Raise TypeError if an option says where tokens are."""
    for name in sorted(options.keys() & set(_OF_RANKS)):
        raise TypeError(
            f"{_NAME}: {name}= is an option of jaxcomm.ring_attention. Leave it out, "
            "and pass arrays in their natural order; or call ring_attention."
        )


def check_shapes(query, key, value) -> None:
    """Raise if whole arrays do not fit together: padding would hide it."""
    _, arrays = batched({"query": query, "key": key, "value": value}, _NAME)
    check_arrays(arrays["query"], arrays["key"], arrays["value"], _NAME)


def mesh_of(mesh, axes: tuple):
    """Return the mesh, or that of ``jax.set_mesh``, if it has the axes.

    Raises:
      TypeError: it is no mesh.
      ValueError: an axis is missing, named twice, or split by a ``shard_map`` already.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise TypeError(
            f"{_NAME}: mesh={mesh!r} is no mesh. Pass a jax.sharding.Mesh, or call it "
            "under jax.set_mesh."
        )
    if not set(axes) <= set(mesh.axis_names):
        name = axes[0] if len(axes) == 1 else axes
        raise ValueError(
            f"dot_product_attention: axis {name!r} is not in the mesh "
            f"{dict(mesh.shape)}. Pass mesh=, or call it under jax.set_mesh."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"{_NAME}: axis_name={axes} names an axis twice. Pass each axis once."
        )
    for axis in axes:
        if axis in jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"{_NAME}: a jax.shard_map has split the arrays over axis {axis!r} "
                "already. Call jaxcomm.ring_attention inside of it."
            )
    return mesh


def ids_of(queries, keys, query, key):
    """Return the segment ids of queries and of keys as int32, or None.

    Args:
      queries, keys: integers of the tokens, or None; see ``segments.ids_of``. The keys
        have those of the queries if there are no others.
      query, key: the arrays.

    Raises:
      TypeError, ValueError: as ``segments.ids_of``.
      ValueError: they are of other tokens, or of the queries alone where the keys are
        another sequence.
    """
    if keys is None:
        keys = queries
    found = []
    for whose, of, x, ids in (
        ("query", "query", query, queries), ("key_value", "key", key, keys)
    ):  # fmt: skip
        what = f"{_NAME}: {whose}_segment_ids"
        ids = segments.ids_of(ids, what)
        if ids is not None and jnp.shape(ids) != x.shape[:-2]:
            raise ValueError(
                f"{what} has shape {jnp.shape(ids)}, and {of} {x.shape}. Pass "
                f"{x.shape[:-2]}, the document of each token."
            )
        found.append(ids)
    return found


def pairs_of(x, what: str, query, key):
    """Return a bias or mask with as many dimensions as the queries.

    Args:
      x: an array with a number for each pair of a query and a key, or None.
      what: ``"bias"`` or ``"mask"``.
      query, key: (B, T, N, H) and (B, S, K, H), or without B.

    Raises:
      ValueError: it does not broadcast to (B, N, T, S), or (N, T, S).
    """
    if x is None:
        return None
    *batch, queries, heads, _ = query.shape
    shape = (*batch, heads, queries, *key.shape[-3:-2])
    x = with_dimensions(x, len(shape))
    if x.ndim != len(shape) or any(
        a not in (1, b) for a, b in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(
            f"{_NAME}: {what} has shape {x.shape}, and does not broadcast to {shape}. "
            f"Pass {'batch, ' * len(batch)}heads, queries and keys, or 1 for any."
        )
    return x


def explicit_axes(mesh) -> tuple:
    """Return the axes of the mesh by which types say how arrays are split.

    Empty if it is not the mesh of the context: then no type does.
    """
    context = jax.sharding.get_abstract_mesh()
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    if mesh != context:
        return ()
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, kind in named if kind == jax.sharding.AxisType.Explicit)


def out_specs(query, axes: tuple, size: int, explicit: tuple):
    """Return how output and log-sum-exp are split: as the queries, tokens over axes.

    Tokens that the axes cannot split evenly are whole on each device.
    """
    sharding = compat.explicit_sharding(query)
    spec: list = [None] * query.ndim
    for i, names in enumerate(() if sharding is None else sharding.spec):
        names = names if isinstance(names, tuple) or names is None else (names,)
        spec[i] = tuple(n for n in names or () if n not in axes) or None
    tokens = query.ndim - 3
    is_even = query.shape[tokens] % size == 0
    spec[tokens] = tuple(n for n in axes if n in explicit and is_even) or None
    return jax.P(*spec[:-1], None), jax.P(*spec[:-1])
