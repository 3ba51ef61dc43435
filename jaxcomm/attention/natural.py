"""Arrays in their natural order: how a mesh splits them, checked."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention.arguments import with_dimensions

_NAME = "dot_product_attention"
_EXPLICIT = jax.sharding.AxisType.Explicit


@dataclasses.dataclass(frozen=True)
class Split:
    """Which axes of a mesh split which dimension.

    Attributes:
      mesh: the mesh, or the one of the context.
      tokens, batch, heads: axes that split the dimension. Others hold copies.
      manual: the axes that a ``shard_map`` has split the arrays over already.
    """

    mesh: Any
    tokens: tuple[str, ...]
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    manual: frozenset[str]

    @property
    def is_typed(self) -> bool:
        """Whether types say how arrays are split."""
        return _EXPLICIT in self.mesh.axis_types

    @property
    def axis_names(self) -> set[str]:
        """The axes for ``shard_map``: all that are not split over already."""
        return set(self.mesh.axis_names) - self.manual

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices along axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def placed(self, x, spec) -> Any:
        """Split an array so, where types say how arrays are split."""
        if x is None or not self.is_typed:
            return x
        spec = self._of_kind(spec, _EXPLICIT)
        return jax.reshard(x, jax.NamedSharding(self.mesh, spec))

    def whole(self, x, spec, axis: int) -> Any:
        """Split an array so, but for one dimension, which is whole on each device.

        Tokens that the axes do not divide need it. XLA would split them unevenly,
        and add rows of no token to the gradient of an embedding (jaxlib 0.10.2).
        """
        names = [*spec, *[None] * (x.ndim - len(spec))]
        names[axis] = None
        x = self.placed(x, names)
        if jax.sharding.AxisType.Auto not in self.mesh.axis_types:
            return x
        mesh = jax.sharding.get_abstract_mesh() if self.manual else self.mesh
        spec = self._of_kind(names, jax.sharding.AxisType.Auto)
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, spec))

    def _of_kind(self, spec, kind):
        """Leave out axes of another type: JAX refuses Auto and Explicit ones as one."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        names = (tuple(a for a in _axes(each) if kinds[a] == kind) for each in spec)
        return jax.P(*(each or None for each in names))

    @classmethod
    def of(cls, sharding, query) -> "Split":
        """Find how queries, keys and values are to be split."""
        spec, mesh = _spec_and_mesh(sharding)
        given = _by_dimension(spec, query)
        tokens = given[1]
        _check_tokens(tokens, spec, mesh)
        manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
        typed = _by_type(query, mesh, tokens)
        batch, heads = (
            _named(given[at], typed[at], spec, mesh, what)
            for at, what in ((0, "the batch"), (2, "the heads"))
        )
        named = (*tokens, *batch, *heads)
        if query.ndim == 4 and len(query) == 1:
            batch = ()  # As where the parameters of a model are made.
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        if twice:
            raise ValueError(
                f"{_NAME}: sharding={spec} names {twice[0]!r} twice. An axis splits "
                "one dimension. Name it once."
            )
        for axis in (*batch, *heads):
            if axis in manual:
                raise ValueError(
                    f"{_NAME}: a jax.shard_map has split the arrays over axis {axis!r} "
                    "already. Leave it out."
                )
        split = cls(mesh, tokens, batch, heads, manual)
        split._check_sizes(spec, query)
        forgotten = [
            axis
            for axis in mesh.axis_names
            if mesh.shape[axis] > 1 and axis not in (*named, *manual)
        ]
        if forgotten:
            raise ValueError(
                f"{_NAME}: the mesh {dict(mesh.shape)} has the axes {forgotten}, and "
                "nothing says what they split: each of their devices would compute a "
                "copy. Name them in sharding=jax.P(batch, tokens, heads). For copies "
                "call jaxcomm.ring_attention inside jax.shard_map."
            )
        return split

    def _check_sizes(self, spec, query) -> None:
        for axes, count, remedy in (
            (self.batch, query.shape[0], "Pad the batch, or pass one"),
            (self.heads, query.shape[-2], "Name axes that do"),
        ):
            if count % self.size(axes):
                raise ValueError(
                    f"{_NAME}: sharding={spec}, and {axes} are {self.size(axes)} "
                    f"devices, which do not divide {count} in query of shape "
                    f"{query.shape}. {remedy}."
                )


def _axes(given) -> tuple:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _spec_and_mesh(sharding):
    """Return what a user gave, with the mesh of the context if it has none."""
    if isinstance(sharding, jax.NamedSharding):
        return sharding.spec, sharding.mesh
    if not isinstance(sharding, jax.P):
        raise TypeError(
            f"{_NAME}: sharding={sharding!r} is no jax.P. Pass how query is split: "
            "jax.P(batch, tokens, heads), or a jax.NamedSharding with its mesh."
        )
    return sharding, jax.sharding.get_abstract_mesh()


def _by_dimension(spec, query) -> list[tuple]:
    """Return the axes that split batch, tokens and heads."""
    found = [_axes(names) for names in spec]
    found += [()] * (query.ndim - len(found))
    if any(found[query.ndim - 1 :]):
        raise ValueError(
            f"{_NAME}: sharding={spec} splits more than batch, tokens and heads of "
            f"query, of shape {query.shape}. Pass jax.P(batch, tokens, heads), or "
            "jax.P(tokens, heads) without a batch."
        )
    return [*[()] * (4 - query.ndim), *found[: query.ndim - 1]]


def _check_tokens(axes: tuple, spec, mesh) -> None:
    """Raise ValueError if the axes of tokens are none, or not of the mesh."""
    if not axes:
        raise ValueError(
            f"{_NAME}: sharding={spec} names no axis for the tokens. Pass "
            "jax.P(batch, tokens, heads), or jax.P(tokens, heads) without a batch."
        )
    if not set(axes) <= set(mesh.axis_names):
        name = axes[0] if len(axes) == 1 else axes
        raise ValueError(
            f"{_NAME}: axis {name!r} is not in the mesh {dict(mesh.shape)}. Pass "
            "sharding=jax.NamedSharding(mesh, spec), or call it under jax.set_mesh."
        )
    for axis in axes:
        if axis in jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"{_NAME}: a jax.shard_map has split the arrays over axis {axis!r} "
                "already. Call jaxcomm.ring_attention inside of it."
            )


def _by_type(query, mesh, tokens: tuple) -> list[tuple]:
    """Return by which Explicit axes the type of the queries splits batch and heads."""
    sharding = compat.explicit_sharding(query)
    if sharding is None or sharding.mesh.shape != mesh.shape:
        return [()] * 3
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == _EXPLICIT} - {*tokens}
    spec = [_axes(names) for names in sharding.spec]
    spec += [()] * (query.ndim - len(spec))
    *batch, of_tokens, heads, size = (
        tuple(axis for axis in axes if axis in explicit) for axes in spec
    )
    if of_tokens or size:
        raise ValueError(
            f"{_NAME}: query is {jax.typeof(query)}, split by {(*of_tokens, *size)} "
            "along tokens or head size. sharding= names "
            f"{tokens} for tokens: name these axes there, or jax.reshard the query."
        )
    return [batch[0] if batch else (), (), heads]


def _named(given: tuple, typed: tuple, spec, mesh, what: str) -> tuple:
    """Return the axes that split a dimension: those named, else those of the type."""
    unknown = [axis for axis in given if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{_NAME}: sharding={spec}, and the mesh {dict(mesh.shape)} has no axis "
            f"{unknown[0]!r}."
        )
    if given and not set(typed) <= set(given):
        raise ValueError(
            f"{_NAME}: sharding={spec}, and the type of query splits {what} by "
            f"{typed}. Pass None in that place, or jax.reshard the query."
        )
    return given or typed


def pairs_of(x, what: str, query, key):
    """Return a bias or mask with as many dimensions as the queries.

    Args:
      x: an array with a number for each pair of a query and a key, or None.
      what: ``"bias"`` or ``"mask"``.
      query, key: (B, T, N, H) and (B, S, K, H), or without B.
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


def repeated_heads(x, split: Split):
    """Repeat key heads, (..., S, K, H), until the axes that split heads divide them."""
    size = split.size(split.heads)
    times = size // math.gcd(x.shape[-2], size)
    return x if times == 1 else jnp.repeat(x, times, axis=-2)
