"""All-gather: collect the keys, then attend once. Halo does so as well."""

import abc
import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.flash.sequences import Among
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import PADDING, Coordinates
from jaxcomm.attention.pairs import Pairs, Run
from jaxcomm.attention.strategies.hops import blocks_of, consecutive
from jaxcomm.attention.strategies.loop import Loop
from jaxcomm.attention.strategies.packing import Found, Packed
from jaxcomm.attention.strategies.strategy import (
    AttentionCall,
    Cost,
    Inputs,
    Keys,
    coordinates_of,
)
from jaxcomm.attention.strategies.walk import Walk
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import pmax
from jaxcomm.collectives.reduce_scatter import psum_scatter
from jaxcomm.compat import gpus


class Gathered(Walk):
    """Attention over collected keys and values, in one hop.

    The backward pass collects anew.
    """

    @abc.abstractmethod
    def runs(self, call: AttentionCall, inputs: Inputs) -> tuple[Run, ...]:
        """Return the queries' runs, if the gathered keys are in their natural order."""

    @abc.abstractmethod
    def collect(self, call: AttentionCall, inputs: Inputs) -> tuple[Keys, Any, tuple]:
        """Return all keys that the queries of this rank may see.

        Returns:
          The keys; their positions; and the parts that a tile should not straddle.
        """

    @abc.abstractmethod
    def scatter(self, call: AttentionCall, inputs: Inputs, grads) -> tuple[Any, Any]:
        """Sum the gradients of gathered keys and values into those of each rank."""

    def columns(self, call: AttentionCall, inputs: Inputs, bias):
        """Return the columns of the bias of the gathered keys."""
        return bias

    def add_columns(self, call: AttentionCall, inputs: Inputs, grad_bias):
        """Return the gradient of the whole bias from that of its columns."""
        return grad_bias

    def loop(self, call, inputs):
        return _Collected(self, call, inputs.gathered(call))

    def _hop(self, call, inputs) -> Hop:
        keys, positions, segments = self.collect(call, inputs)
        layouts, bias = (inputs.query_layout, inputs.key_layout), inputs.bias
        bias = None if bias is None else self.columns(call, inputs, bias)
        of_queries = inputs.query_ids, inputs.query_range
        queries = coordinates_of(layouts[0], call.rank(), 1, *of_queries)
        of_keys = Coordinates(positions, keys.segment_ids, keys.range)
        runs = self.runs(call, inputs) if may_have_runs(call, inputs) else ()
        if runs and layouts[1].length != call.size * layouts[1].local_length:
            batch = inputs.query.shape[0]
            queries = _with_padding(call, queries, batch)
            of_keys = _with_padding(call, of_keys, batch)
        hop = call.hop.replace(
            query=inputs.query,
            key=keys.key,
            value=keys.value,
            scores=call.scores(inputs, bias),
            pairs=Pairs(
                call.mask,
                queries=queries,
                keys=of_keys,
                segments=(layouts[0].segments, segments),
                runs=runs,
            ),
        )
        if not call.mask.is_everything:
            return narrowed(hop, f"the strategy {self.name!r} masks by positions")
        return narrowed(hop, blocks_of(*layouts, call.mask, keys.key.shape[1])[0])


class _Collected(Loop):
    """One hop, of keys that are collected before."""

    def __init__(self, strategy: Gathered, call: AttentionCall, inputs: Inputs):
        self._strategy = strategy
        self._collect = functools.partial(strategy._hop, call)
        own: Any = None  # Until it is ready: documents alone are looked at before.
        if inputs.query_ids is not None:
            own = jax.eval_shape(self._collect, inputs)
        super().__init__(call, inputs, own)
        self.is_ready = False

    def ready(self, inputs=None):
        if self.is_ready:
            return copy.copy(self)
        loop: Any = super().ready(inputs)
        loop.own = self._collect(loop.inputs)
        loop.is_ready = True
        return loop

    def hop(self, block, distance):
        return self.own

    def columns(self, grad_bias, distance, total=None):
        if grad_bias is None:
            return None
        return self._strategy.add_columns(self.call, self.inputs, grad_bias)

    def home(self, grads):
        of_keys = grads.key, grads.value
        key, value = self._strategy.scatter(self.call, self.inputs, of_keys)
        return grads._replace(key=key, value=value)

    def look(self, packed: Packed, most: int) -> Found:
        """Look at the tokens of runs that are among their keys."""
        runs = [Among(self.own, run) for run in self.own.pairs.runs]
        are_right = functools.reduce(jnp.logical_and, [x.are_right(most) for x in runs])
        is_held = self.inputs.is_right
        way = packed.found(0, are_right, None if is_held is None else ~is_held)
        way = pmax(way, self.call.axis_name)
        return Found(way, tuple(x.starts(most) for x in runs))


def may_have_runs(call: AttentionCall, inputs: Inputs) -> bool:
    """Say whether a kernel may go by runs of queries and keys."""
    has_mask = inputs.bias is not None or inputs.has_ranges
    return gpus.are_of_mesh() and call.is_self and not has_mask


def _with_padding(call: AttentionCall, tokens: Coordinates, batch: int) -> Coordinates:
    """Return tokens with segment ids that tell padding, which has no others."""
    if tokens.segment_ids is not None:
        return tokens
    ids = jnp.where(tokens.positions < call.mask.key_length, 0, PADDING)
    return tokens._replace(segment_ids=jnp.broadcast_to(ids, (batch, ids.shape[-1])))


@dataclasses.dataclass(frozen=True)
class AllGather(Gathered):
    """One collective of all keys and values; backward another, and a reduce-scatter.

    It sends what a ring sends, in one call and before computing. Memory for keys and
    values grows with the number of ranks. The reduce-scatter is in float32.

    Source: Llama team, The Llama 3 Herd of Models, 2024.
    """

    name = "all_gather"

    def cost(self, problem):
        others = problem.size - 1
        return Cost(
            1,
            others * problem.block_bytes,
            others * (problem.block_bytes + problem.key_grad_bytes),
            problem.size * problem.key_bytes,
            steps=4,
        )

    def runs(self, call, inputs):
        parts = consecutive(inputs.query_layout)
        whole = (0, call.size * inputs.key_layout.local_length)
        return tuple(Run(part, whole) for part in parts)

    def _is_natural(self, call, inputs):
        """Whether the gathered keys are put into their natural order."""
        return may_have_runs(call, inputs) and bool(self.runs(call, inputs))

    def collect(self, call, inputs):
        layout = inputs.key_layout
        leaves, tree = jax.tree.flatten(inputs.keys)
        whole = all_gather(leaves, call.axis_name, axis=1, tiled=True)
        if self._is_natural(call, inputs):
            order = np.argsort(layout.all_positions())
            whole = [_in_order(x, order) for x in whole]
            positions = jax.lax.iota(jnp.int32, len(order))
            segments = (len(order),)
        else:
            positions = coordinates_of(layout, 0, call.size).positions
            segments = layout.segments * call.size
        return jax.tree.unflatten(tree, whole), positions, segments

    def scatter(self, call, inputs, grads):
        if self._is_natural(call, inputs):
            order = inputs.key_layout.all_positions()
            grads = jax.tree.map(lambda x: _in_order(x, order), grads)
        return psum_scatter(grads, call.axis_name, scatter_dimension=1, tiled=True)


def _in_order(x, order: np.ndarray):
    """Return the tokens of (B, T, ...) in another order, by slices of what is whole."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    parts = np.split(order, breaks)
    return jnp.concatenate([x[:, part[0] : part[-1] + 1] for part in parts], 1)
