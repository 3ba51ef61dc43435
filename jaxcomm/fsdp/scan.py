"""``jax.lax.scan`` over layers whose parameters are split over devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.fsdp import passes
from jaxcomm.fsdp.specs import dimensions_of
from jaxcomm.primitives import request
from jaxcomm.primitives.call import AxisName, Call, PyTree, call_of
from jaxcomm.primitives.pvary import vary


def fsdp_scan(
    layer: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    params: PyTree,
    axis_name: AxisName,
    *,
    specs: PyTree,
    lane: str | None = None,
    backend: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Scan over layers, and gather the next layer's parameters while one computes.

    As ``jax.lax.scan(layer, init, params)`` over whole parameters, with fully sharded
    data parallelism (FSDP): each device holds a part of them, and gathers one layer at
    a time. For use inside ``jax.shard_map``.

    The gradient keeps the inputs of the layers. Backward, each layer is computed again,
    and its parameters are gathered again while the layer after it computes. Gradients
    are summed as soon as they are there, and each device keeps its part. There is no
    forward mode (``jax.jvp``).

    Beside what ``jax.checkpoint`` of a layer that gathers needs, one more layer's
    parameters are in memory. Each pass gathers the last layer it computes twice.

    Args:
      layer: ``layer(x, weights) -> (x, output)`` as of ``jax.lax.scan``; ``weights`` is
        like ``params``, of one layer and whole. It may use other traced arrays, which
        have gradients.
      init: a pytree of arrays, the ``x`` of the first layer.
      params: a pytree of arrays (layers, ...), this device's parts.
      axis_name: the mesh axis, or a tuple of axes, that splits the parameters.
      specs: how ``params`` are split, as in the ``in_specs`` of ``jax.shard_map``: a
        ``jax.P`` for each leaf, or for all leaves of a subtree. A leaf without
        ``axis_name`` in its spec is whole on each device, as it comes: the seeds of
        layers, say.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

    Returns:
      The ``x`` of the last layer, and the outputs of all layers, stacked.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``layer`` returns no pair, or an ``x`` of other types than it got.
      ValueError: if ``params`` have no layers, or differ in their number. If ``specs``
        do not fit ``params``, or split nothing over the axis. If they split the layers,
        or a dimension over more axes. If a parameter that they split is typed as equal
        on all devices.

    Example:
      >>> def layer(x, w):
      ...     return jnp.tanh(x @ w), None
      >>> split = jax.P(None, "i")
      >>> def model(x, w):
      ...     return jaxcomm.fsdp_scan(layer, x, w, "i", specs=split)[0]
      >>> f = jax.shard_map(model, in_specs=(jax.P("i"), split), out_specs=jax.P("i"))
      >>> jax.jit(f)(jnp.ones((4, 8)), jnp.ones((3, 8, 8))).shape
      (4, 8)
    """
    call = call_of("fsdp_scan", axis_name, lane=lane, backend=backend)
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
    count = _count(leaves, call)
    split_at = dimensions_of(specs, params, call)
    is_split = [d is not None for d in split_at]
    split = _checked([x for x, its in zip(leaves, is_split, strict=True) if its], call)
    whole = vary([x for x, its in zip(leaves, is_split, strict=True) if not its], call)
    xs, x_tree = jax.tree.flatten(init)
    xs = vary(list(map(_strong, xs)), call)
    dimensions = tuple(d for d in split_at if d is not None)

    def weights_of(split, whole):
        parts, rest = iter(split), iter(whole)
        return tree.unflatten([next(parts if its else rest) for its in is_split])

    traced, shapes = jax.make_jaxpr(layer, return_shape=True)(
        x_tree.unflatten(map(jax.typeof, xs)),
        weights_of(
            [_of_one(x, d, call) for x, d in zip(split, dimensions, strict=True)],
            [_of_one(x, None, call) for x in whole],
        ),
    )
    y_tree = _checked_results(traced, shapes, x_tree, call)

    def compute(consts, x, weights, mine):
        closed = jax.extend.core.ClosedJaxpr(traced.jaxpr, consts)
        weights = jax.tree.leaves(weights_of(weights, mine))
        outs = jax.extend.core.jaxpr_as_fun(closed)(*x, *weights)
        return list(map(_strong, outs[: len(x)])), outs[len(x) :]

    layers = passes.Layers(compute, count, call, dimensions)
    consts = list(map(jnp.asarray, traced.consts))
    # Where the caller compiles nothing, JAX cannot say that there is no forward mode.
    run = jax.jit(functools.partial(passes.run, layers))
    out, ys = run(consts, xs, split, whole)
    return x_tree.unflatten(out), y_tree.unflatten(ys)


def _count(leaves: list, call: Call) -> int:
    """Return the number of layers, which all parameters must agree on."""
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            f"{call.where}: a leaf of params is a scalar. Stack the layers' parameters:"
            " dimension 0 of each leaf counts layers."
        )
    counts = {leaf.shape[0] for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"{call.where}: dimension 0 of the leaves of params has sizes "
            f"{sorted(counts)}. It counts layers: one size, at least 1."
        )
    return counts.pop()


def _checked(split: list, call: Call) -> list:
    """Return the split parameters, if their types agree that they are split."""
    split = request.as_arrays(split, call)
    for leaf in split:
        if call.lacking(leaf):
            raise ValueError(
                f"{call.where}: specs split a parameter of type {jax.typeof(leaf)}, "
                "which is equal on all devices. Pass the in_specs of jax.shard_map."
            )
    return split


def _strong(x):
    """Return an array that is not weakly typed, as a loop carries it."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x


def _of_one(stack, dimension: int | None, call: Call):
    """Return the type of one layer's parameter, gathered along a dimension."""
    shape = list(stack.shape[1:])
    if dimension is not None:
        shape[dimension] *= call.axes_size
    return jax.typeof(jax.lax.index_in_dim(stack, 0, keepdims=False)).update(
        shape=tuple(shape)
    )


def _checked_results(traced, shapes, x_tree, call: Call):
    """Return the structure of a layer's outputs, if it can be scanned."""
    if not isinstance(shapes, tuple) or len(shapes) != 2:
        raise TypeError(
            f"{call.where}: layer must return a pair (x, output), got "
            f"{jax.tree.structure(shapes)}. Return None for no output."
        )
    found = jax.tree.structure(shapes[0])
    if found != x_tree:
        raise TypeError(
            f"{call.where}: layer returns an x of structure {found}, and got {x_tree}. "
            "The next layer takes what this one returns."
        )
    outs = traced.out_avals[: x_tree.num_leaves]
    for given, out in zip(traced.in_avals[: len(outs)], outs, strict=True):
        if not compat.is_same_type(given, out):
            raise TypeError(
                f"{call.where}: layer returns an x of type {compat.type_text(out)}, "
                f"and got {compat.type_text(given)}. The next layer takes what this "
                "one returns: cast init, by jaxcomm.pcast where devices are to differ."
            )
    return jax.tree.structure(shapes[1])
