"""What a collective says about itself; ``_primitive.define`` does the rest."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend

from jaxcomm import compat
from jaxcomm.primitives import batching


class Collective:
    """What is particular to one collective. Subclasses override what differs.

    Attributes:
      name: of the C++ planner, ``ffi/planners/<name>.cc``.
      replicated: every rank of a group gets the same result.
      dimension_params: parameters that hold one dimension for each operand, counted
        without batch dimensions.
    """

    name: str
    replicated = False
    dimension_params: tuple[str, ...] = ()

    def shape(
        self, shape: tuple[int, ...], size: int, i: int, **params
    ) -> Sequence[int]:
        """Returns the shape of result ``i`` from that of operand ``i``."""
        return shape

    def out_avals(self, avals: Sequence, size: int, **params) -> list:
        """Returns the results' avals; varying axes are set by the caller."""
        return [
            aval.update(shape=tuple(self.shape(aval.shape, size, i, **params)))
            for i, aval in enumerate(avals)
        ]

    def aliases(self, num_operands: int) -> dict[int, int]:
        """Returns operand to result, for results that are an operand's own buffer."""
        return {}

    def planner_params(self, avals: Sequence, size: int, **params) -> list[int]:
        """Returns the integers the C++ planner wants."""
        return []

    def emulate(self, x: jax.Array, i: int, **params) -> jax.Array:
        """Computes leaf ``i`` of all ranks at once.

        Args:
          x: the operands of the ranks, stacked along axis 0 in rank order.
          i: which leaf.
          **params: the collective's own parameters.

        Returns:
          The results of the ranks, stacked likewise.
        """
        raise NotImplementedError

    def emulate_all(self, xs: Sequence, size: int, **params) -> list:
        """Computes all leaves of all ranks at once; see :meth:`emulate`."""
        return [self.emulate(x, i, **params) for i, x in enumerate(xs)]

    def fold(self, stacked: Sequence, **params) -> list | None:
        """Returns operands that stand for several ranks', or None if none can."""
        return None

    def xla(self, xs: Sequence, axes, index_groups, **params) -> list:
        """Does the same with the collectives of jax.lax."""
        size = math.prod(compat.axis_size(axis) for axis in axes)
        stacked = [jax.lax.all_gather(x, axes) for x in xs]
        outs = batching.emulate_groups(self, stacked, size, index_groups, **params)
        rank = jax.lax.axis_index(axes)
        return [jax.lax.dynamic_index_in_dim(out, rank, 0, False) for out in outs]

    def without_mean(self, size: int, **params):
        """Returns a ``function(bind, *xs) -> outs`` for transports that do not average.

        None if nothing is averaged.
        """
        return None

    def dual(self, **params) -> "tuple[Collective, dict] | None":
        """Returns the collective that is the transpose, and its parameters.

        None: the transpose is no collective.
        """
        raise NotImplementedError

    def transpose(self, cts: Sequence, **params) -> Sequence:
        """Returns the cotangents of the operands."""
        dual = self.dual(**params)
        if dual is None:
            raise NotImplementedError
        collective, params = dual
        return collective.primitive.bind(*cts, **params)

    def transpose_with(self, cts, operands, **params) -> Sequence:
        """Like :meth:`transpose`, for those not linear in every operand."""
        return self.transpose(cts, **params)

    def batch(self, axis_data, operands, dims, **params):
        """Applies the collective under ``jax.vmap``; operands' dims None or int."""
        return batching.batch(self, axis_data, operands, dims, **params)

    def jvp(self, primals, tangents, **params):
        """Returns results and their tangents; by default the collective is linear."""
        outs = self.primitive.bind(*primals, **params)
        return outs, self.primitive.bind(*tangents, **params)

    primitive: jax.extend.core.Primitive
    pair: Any  # of primitives, if it can be had in two halves: see _pair.py
