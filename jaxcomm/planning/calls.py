"""One collective of a program, as planning sees it."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxcomm.communicator.replica_groups import IndexGroups


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective of a program.

    Attributes:
      name: what the user called, ``"psum"``.
      collective: of the C++ planner, ``"all_reduce"``.
      axes: the axes, in the order that numbers the ranks.
      index_groups: the ``axis_index_groups``, or None.
      lane: its lane; the default one if the user named none.
      backend: what the user chose, or None.
      is_ours: whether it is a call of jaxcomm, and not of ``jax.lax``.
      leaves: shape and dtype of each operand, on one device.
      op: of a reduction; else ``"sum"``, which nobody looks at.
      is_split: whether it may run beside what follows it: it is split-phase, or XLA's.
    """

    name: str
    collective: str
    axes: tuple[str, ...]
    index_groups: IndexGroups
    lane: str
    backend: str | None
    is_ours: bool
    leaves: tuple[tuple[tuple[int, ...], str], ...]
    op: str = "sum"
    is_split: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the operands of a rank."""
        return sum(math.prod(shape) * itemsize(dtype) for shape, dtype in self.leaves)

    @property
    def operands(self) -> str:
        """The operands as a flight record writes them: ``"float32[4,8]"``."""
        return ", ".join(
            f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in self.leaves
        )


def leaves_of(avals: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of each aval."""
    return tuple((tuple(aval.shape), str(aval.dtype)) for aval in avals)


def itemsize(dtype: str) -> int:
    """Return the bytes of a number.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    if dtype == "float0":
        return 0
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        # Types of ml_dtypes that numpy does not find by name.
        import jax.numpy as jnp

        return jnp.dtype(getattr(jnp, dtype)).itemsize
