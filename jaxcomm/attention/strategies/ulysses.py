"""Ulysses: ranks exchange tokens for heads. USP: around a ring of groups."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.kernel import Grads, finite, is_empty
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.strategies.hops import hops_of
from jaxcomm.attention.strategies.strategy import (
    AttentionCall,
    Cost,
    Inputs,
    Problem,
    Saved,
    Strategy,
    inner,
    keep,
    rounded,
)
from jaxcomm.attention.strategies.walk import Ring
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_to_all import all_to_all
from jaxcomm.collectives.reduce_scatter import psum_scatter
from jaxcomm.primitives import arguments


@dataclasses.dataclass(frozen=True)
class Ulysses(Strategy):
    """All-to-all among ``width`` neighbouring ranks, around a ring of what is left.

    Each rank gets the tokens of its neighbours and a part of the heads. Key heads that
    the width does not divide are repeated first; then their gradients are still to be
    summed, and travel in float32. With ``width`` equal to the size of the axis there is
    no ring left.

    Sources: Jacobs et al., DeepSpeed Ulysses, 2023; Fang and Zhao, USP, 2024.

    Attributes:
      width: how many ranks exchange heads.
    """

    width: int
    name = "ulysses"

    def __post_init__(self):
        what = f"{type(self).__name__}: width"
        width = arguments.integer(self.width, what)
        if width < 1:
            raise ValueError(f"{what}={width}. Pass one rank or more.")
        object.__setattr__(self, "width", width)

    def why_not(self, problem):
        if problem.size % self.width:
            return f"{problem.size} ranks are not divisible into groups of {self.width}"
        needed = math.lcm(problem.key_heads, self.width)
        if problem.heads % needed:
            return (
                f"{self.width} ranks share {problem.heads} query heads and "
                f"{problem.key_heads} key heads, and only multiples of {needed} query "
                "heads can be shared so"
            )
        return None

    def cost(self, problem):
        others, layouts = self.width - 1, (problem.query_layout, problem.key_layout)
        repeated = math.lcm(problem.key_heads, self.width)
        sent = dataclasses.replace(problem, key_heads=repeated)
        # Each rank has 1 / width of the heads, of width as many tokens.
        there = dataclasses.replace(
            problem, heads=problem.heads // self.width, key_heads=repeated // self.width
        )
        ring = Ring(self.width).cost(there)
        queries = problem.rows * problem.head_size * problem.itemsize
        output = problem.rows * problem.value_size * problem.itemsize
        per_row = problem.rows * max(problem.itemsize, 4)
        is_repeated = repeated > problem.key_heads
        grads = sent.key_grad_bytes if is_repeated else sent.key_bytes
        # There: queries, keys and values; the gradient of the output, the output, and
        # the log-sum-exp and delta of each row. Back: what was computed.
        forward = queries + sent.key_bytes + output + per_row
        backward = 2 * output + 2 * per_row + queries + grads
        return Cost(
            2 + ring.sends,
            others / self.width * forward
            + others * sum(map(problem.id_bytes, layouts))
            + ring.forward_bytes,
            others / self.width * backward + ring.backward_bytes,
            ring.memory,
            width=self.width,
            steps=2 + ring.steps,
            hops=ring.hops,
        )

    def forward(self, call, inputs):
        exchange = _HeadExchange(call, self.width, inputs.query.shape[2])
        key, value = (
            exchange.repeat(x, inputs.key.shape[2]) for x in (inputs.key, inputs.value)
        )
        query, key, value = exchange.to_heads((inputs.query, key, value))
        there = inputs._replace(
            query=query,
            key=key,
            value=value,
            query_ids=exchange.gather(inputs.query_ids),
            key_ids=exchange.gather(inputs.key_ids),
            query_range=jax.tree.map(exchange.gather, inputs.query_range),
            key_range=jax.tree.map(exchange.gather, inputs.key_range),
            bias=exchange.bias(inputs.bias, inputs.query.shape[1]),
            slopes=exchange.mine(inputs.slopes),
            seeds=exchange.mine(inputs.seeds),
            table=None,
        )
        group = _Group(call, self.width, there)
        group.key_heads = inputs.key.shape[2]
        group.bias_shape = getattr(inputs.bias, "shape", None)
        (out, lse), kept = group.ring.forward(group.call, group.sort(there))
        # The same rounding as at the end: it happens before the way home.
        out, lost = rounded(call, inputs, out)
        lost = keep(None if lost is None else (lost, finite(lse)))
        out, lse = group.sort_back((out, lse))
        return exchange.to_tokens((out, lse)), (kept, lost, group)

    def backward(self, call, kept, saved):
        kept, lost, group = kept
        exchange = _HeadExchange(call, self.width, saved.grad_out.shape[2])
        there = Saved(*group.sort_tokens(exchange.to_heads(saved)))
        if lost is not None:
            lost, lse = lost
            # Sinks have made the weights smaller since.
            share = jnp.where(is_empty(lse), 0, jnp.exp(lse - there.lse))
            more = inner(there.grad_out, lost, None, lse.dtype)
            there = there._replace(delta=there.delta + share * more)
        found = group.sort_grads_back(group.ring.backward(group.call, kept, there))
        dtype = saved.grad_out.dtype
        block = (found.key, found.value)
        if not exchange.repeats(group.key_heads):
            block = jax.tree.map(lambda x: x.astype(dtype), block)
        query, key, value = exchange.to_tokens((found.query.astype(dtype), *block))
        key, value = (exchange.sum_repeated(x, group.key_heads) for x in (key, value))
        return Grads(
            query,
            key,
            value,
            exchange.bias_back(found.bias, group.bias_shape),
            exchange.heads_back(found.slopes),
        )


@jax.tree_util.register_static
class _Group:
    """What is computed after the exchange: a ring of groups, or all in one hop.

    If one group is all ranks, and a kernel can compute the whole sequence by blocks in
    its natural order, the tokens are put into it.

    Attributes:
      ring: of groups.
      call: for the ring.
      key_heads, bias_shape: of the inputs, for the backward pass.
    """

    key_heads: int
    bias_shape: tuple[int, ...] | None

    def __init__(self, call: AttentionCall, width: int, there: Inputs):
        self.ring, self.call = Ring(width), call
        self._places = self._back = None, None
        # Not those of there: it may outlive the trace of an order that is data.
        self._layouts = {}
        layouts = there.query_layout, there.key_layout
        is_rule = all(layout.is_static for layout in layouts)
        has_mask = there.bias is not None or there.has_ranges
        if width < call.size or not is_rule or has_mask:
            return
        whole = tuple(
            Layout("contiguous", 1, layout.size * layout.local_length)
            for layout in layouts
        )
        alone = dataclasses.replace(call, size=1)
        natural = dict(zip(("query_layout", "key_layout"), whole, strict=True))
        hop, _ = hops_of(alone, there._replace(**natural))
        if hop.pairs.blocks or hop.pairs.runs:
            self.ring, self.call = Ring(), alone
            self._layouts, self._places = natural, [x.places() for x in layouts]
            self._back = [x.all_positions() for x in layouts]

    def sort(self, inputs: Inputs) -> Inputs:
        """Put tokens from rank order into the one in which they are computed."""
        queries, keys = self._places
        return _moved(inputs, self._places)._replace(
            query_ids=_take(inputs.query_ids, queries),
            key_ids=_take(inputs.key_ids, keys),
            **self._layouts,
        )

    def sort_tokens(self, tree):
        """Do so with arrays of the queries."""
        return [_take(x, self._places[0]) for x in tree]

    def sort_back(self, tree):
        """Undo :meth:`sort_tokens`."""
        return [_take(x, self._back[0]) for x in tree]

    def sort_grads_back(self, grads: Grads) -> Grads:
        """Undo :meth:`sort`, of gradients."""
        return _moved(grads, self._back)


def _moved(of, places):
    """Return inputs or gradients with queries, keys and values at these places."""
    queries, keys = places
    return of._replace(
        query=_take(of.query, queries),
        key=_take(of.key, keys),
        value=_take(of.value, keys),
    )


def _take(x: Any, places) -> Any:
    if x is None or places is None or np.array_equal(places, np.arange(len(places))):
        return x
    return jnp.take(x, places, axis=1, unique_indices=True, mode="clip")


class _HeadExchange:
    """The exchange of tokens for heads among groups of neighbouring ranks."""

    def __init__(self, call, width: int, heads: int):
        self.call, self.width, self.heads = call, width, heads
        self.options = {}
        if width < call.size:
            self.options["axis_index_groups"] = [
                list(range(start, start + width))
                for start in range(0, call.size, width)
            ]

    def _all_to_all(self, tree, split_axis, concat_axis):
        return all_to_all(
            tree, self.call.axis_name, split_axis, concat_axis, tiled=True,
            **self.options,
        )  # fmt: skip

    def to_heads(self, tree):
        """(B, T, N, ...) to (B, width T, N / width, ...)."""
        return self._all_to_all(tree, 2, 1)

    def to_tokens(self, tree):
        """Undo :meth:`to_heads`."""
        return self._all_to_all(tree, 1, 2)

    def gather(self, ids):
        """(B, T) to (B, width T)."""
        if ids is None:
            return None
        return all_gather(ids, self.call.axis_name, axis=1, tiled=True, **self.options)

    def repeats(self, key_heads: int) -> int:
        """Return how many of each key head are sent beyond the first."""
        return math.lcm(key_heads, self.width) // key_heads - 1

    def repeat(self, x, key_heads: int):
        """Repeat key heads so that the width divides them."""
        count = self.repeats(key_heads) + 1
        return jnp.repeat(x, count, axis=2) if count > 1 else x

    def sum_repeated(self, x, key_heads: int):
        """Undo :meth:`repeat`, of gradients."""
        count = self.repeats(key_heads) + 1
        if count == 1:
            return x
        return x.reshape(*x.shape[:2], key_heads, count, x.shape[3]).sum(3)

    def mine(self, x):
        """Return this rank's part of the heads of (B, N), or None of None."""
        if x is None:
            return None
        count = self.heads // self.width
        start = self.call.rank() % self.width * count
        return jax.lax.dynamic_slice_in_dim(x, start, count, axis=1)

    def heads_back(self, x):
        """Put the gradient of this rank's heads, (B, N / width), among zeros."""
        if x is None:
            return None
        count = self.heads // self.width
        whole = jnp.zeros_like(x, shape=(x.shape[0], self.heads))
        start = self.call.rank() % self.width * count
        return jax.lax.dynamic_update_slice_in_dim(whole, x, start, axis=1)

    def bias(self, bias, queries: int):
        """Return the bias of this rank's heads and of all tokens of the group."""
        if bias is None:
            return None
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], queries, bias.shape[3]))
        if bias.shape[1] > 1:
            return self._all_to_all(bias, 1, 2)
        return all_gather(bias, self.call.axis_name, axis=2, tiled=True, **self.options)

    def bias_back(self, grad, shape):
        """Undo :meth:`bias`, of the gradient of a bias of that shape."""
        if grad is None:
            return None
        if shape[1] > 1:
            grad = self._all_to_all(grad, 2, 1)
        else:
            options = {"scatter_dimension": 2, "tiled": True, **self.options}
            grad = psum_scatter(grad, self.call.axis_name, **options)
        return grad.sum(2, keepdims=True) if shape[2] == 1 else grad


@dataclasses.dataclass(frozen=True)
class Usp(Ulysses):
    """Ulysses with a width below the size of the axis.

    Of two mesh axes the last is the one that exchanges heads; put it on the faster
    links.
    """

    name = "usp"

    @classmethod
    def of(cls, problem: Problem) -> "Usp":
        """Choose the width: the last of several axes, or the most that key heads allow.

        Key heads are then not repeated.
        """
        if len(problem.axis_sizes) > 1:
            return cls(problem.axis_sizes[-1])
        divisors = [
            width
            for width in range(1, problem.size)
            if problem.size % width == 0 and problem.key_heads % width == 0
        ]
        return cls(max(divisors, default=1))

    def why_not(self, problem):
        if not 1 < self.width < problem.size:
            return (
                f"a group of {self.width} of {problem.size} ranks leaves nothing to "
                "Ulysses or nothing to the ring; split the sequence over two axes, or "
                "pass jaxcomm.attention.Ulysses(width)"
            )
        return super().why_not(problem)
