"""What a collective says about itself; ``define.define`` does the rest."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from jaxcomm.primitives import batching
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.gathered import emulate_groups, gathered
from jaxcomm.primitives.registry import COLLECTIVES


class Collective:
    """What is particular to one collective. Subclasses override what differs.

    Attributes:
      name: of the C++ planner, ``ffi/planners/<name>.cc``.
      planner: the name again, or that of another collective's planner that does the
        same with ``planner_params``.
      replicated: every rank of a group gets the same result.
      dimension_params: parameters that hold one dimension for each operand, counted
        without batch dimensions.
      primitive: what ``define.define`` makes.
      pair: two primitives, if the collective can be split: see ``split_phase.py``.
    """

    name: str
    planner: str
    replicated = False
    dimension_params: tuple[str, ...] = ()
    primitive: jax.extend.core.Primitive
    pair: Any

    def __init_subclass__(cls, **options):
        """Use the planner of the collective's own name by default."""
        super().__init_subclass__(**options)
        if "name" in vars(cls) and "planner" not in vars(cls):
            cls.planner = cls.name

    def shape(
        self, shape: tuple[int, ...], size: int | None, i: int, **params
    ) -> Sequence[int]:
        """Return the shape of result ``i`` from that of operand ``i``."""
        return shape

    def out_avals(self, avals: Sequence, size: int | None, **params) -> list:
        """Return the results' avals; the caller sets varying axes.

        The size is None where groups differ in size.
        """
        return [
            aval.update(shape=tuple(self.shape(aval.shape, size, i, **params)))
            for i, aval in enumerate(avals)
        ]

    def aliases(self, num_operands: int) -> dict[int, int]:
        """Return operand to result, for results that are an operand's own buffer."""
        return {}

    def planner_params(self, avals: Sequence, size: int, **params) -> list[int]:
        """Return the integers that the C++ planner takes."""
        return []

    def emulate(self, x: jax.Array, i: int, **params) -> jax.Array:
        """Compute leaf ``i`` of all ranks at once.

        Args:
          x: the operands of the ranks, stacked along axis 0 in rank order.
          i: which leaf.
          **params: the collective's own parameters.

        Returns:
          The results of the ranks, stacked likewise.
        """
        raise NotImplementedError

    def emulate_all(self, xs: Sequence, size: int, **params) -> list:
        """Compute all leaves of all ranks at once; see :meth:`emulate`."""
        return [self.emulate(x, i, **params) for i, x in enumerate(xs)]

    def fold(self, stacked: Sequence, **params) -> list | None:
        """Reduce the operands of ranks in one place to one operand, or return None."""
        return None

    def xla(self, xs: Sequence, call: Call, **params) -> list:
        """Compute the same with the collectives of jax.lax."""

        def compute(stacked):
            return emulate_groups(
                self, stacked, call.axes_size, call.index_groups, **params
            )

        def gather(xs):
            return [jax.lax.all_gather(x, call.axes) for x in xs]

        return gathered(compute, gather, xs, call.axes)

    def transposed(self, call: Call, **params) -> "Transposed":
        """Return the transpose. Those of this package are in one table.

        See ``collectives/transposes.py``.
        """
        raise NotImplementedError(f"{call.name} has no transpose")

    def batch(self, axis_data, operands, dims, *, call: Call, **params):
        """Apply the collective under ``jax.vmap``; operands' dims None or int."""
        return batching.batch(self, axis_data, operands, dims, call=call, **params)

    def jvp(self, primals, tangents, **params):
        """Return results and their tangents; by default the collective is linear."""
        outs = self.primitive.bind(*primals, **params)
        return outs, self.primitive.bind(*tangents, **params)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A collective with all its parameters."""

    collective: Collective
    params: dict[str, Any]

    def __call__(self, xs: Sequence) -> list:
        """Apply it to operands."""
        return self.collective.primitive.bind(*xs, **self.params)


# A collective whose transpose is a collective gives that. Others give a function from
# cotangents and operands (undefined where linear) to the operands' cotangents.
Transposed = Bound | Callable[[Sequence, Sequence], Sequence]


def bound(name: str, call: Call, **params) -> Bound:
    """Return the collective of a name with parameters."""
    return Bound(COLLECTIVES[name], {"call": call, **params})
