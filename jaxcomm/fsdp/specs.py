"""Where parameters are split, read from the specs of ``jax.shard_map``."""

import jax

from jaxcomm.primitives.call import Call, PyTree


def dimensions_of(specs: PyTree, params: PyTree, call: Call) -> list[int | None]:
    """Return which dimension of a layer's parameters is split over the call's axes.

    Args:
      specs: a ``jax.P`` for each leaf of ``params``, or for all leaves of a subtree.
      params: a pytree of arrays (layers, ...).
      call: for its axes.

    Returns:
      For each leaf the dimension, counted without that of the layers, or None if the
      axes do not split it.

    Raises:
      TypeError: a spec is no ``jax.P``.
      ValueError: the specs do not fit, or split what cannot be gathered.
    """
    try:
        of_leaves = jax.tree.leaves(jax.tree.broadcast(specs, params))
    except ValueError as error:
        raise ValueError(
            f"{call.where}: specs do not fit params. Pass a jax.P for each leaf, or "
            f"for all leaves of a subtree, as to jax.shard_map. {error}"
        ) from None
    paths = [jax.tree_util.keystr(path) for path, _ in _with_paths(params)]
    leaves = jax.tree.leaves(params)
    found = [
        _dimension(spec, leaf, f"{call.where}: the spec {spec} of params{path}", call)
        for spec, leaf, path in zip(of_leaves, leaves, paths, strict=True)
    ]
    if all(dimension is None for dimension in found):
        raise ValueError(
            f"{call.where}: specs split no parameter over {call.axes}, so there is "
            "nothing to gather. Pass the specs of jax.shard_map, or use jax.lax.scan."
        )
    return found


def _with_paths(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _dimension(spec, leaf, what: str, call: Call) -> int | None:
    if not isinstance(spec, jax.P):
        raise TypeError(f"{what} is {type(spec).__name__}; pass a jax.P")
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"{what} has {len(spec)} entries, and the array {leaf.ndim} dimensions. "
            "Pass one for each dimension, or fewer"
        )
    axes = set(call.axes)
    for i, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        if not axes & set(names):
            continue
        if i == 0:
            raise ValueError(
                f"{what} splits dimension 0, which counts layers. Split another one: "
                "each device needs its part of every layer."
            )
        if names != call.axes:
            raise ValueError(
                f"{what} splits dimension {i} over {names}, of which {call.axes} alone "
                "cannot gather it. Split another dimension over the other axes, or "
                f"pass axis_name={names}."
            )
        return i - 1
    return None
