"""What :func:`jaxcomm.plan` returns: a value that prints as tables."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxcomm.planning import text
from jaxcomm.planning.check import Check, check
from jaxcomm.planning.contents import Contents


@dataclasses.dataclass(frozen=True)
class Plan(Contents):
    """What a layout costs; prints as tables, in a notebook as HTML.

    Attributes:
      axes: sizes of the mesh's axes, by name.
      machine: whose numbers the figures are made of.
      processes: how many there are.
      communicators: in the order in which they are made.
      calls: the collectives of a step, each once.
      attention: the attention layers that were asked for.
      ranks: classes of ranks that hold the same, most ranks first.
      startup: messages and seconds until the communicators are there.
      warnings: what is bad about the plan.
      notes: what is not known of it.

    Example:
      >>> made = jaxcomm.plan({"data": 2, "context": 4}, machine="h200")
      >>> made.ranks[0].count, made.ranks[0].communicators
      (8, 3)
      >>> made.to_json()["communicators"][0]["axes"]
      ['data']
    """

    def check(self, records: Iterable[Any] | None = None) -> Check:
        """Compare the times of the plan with those of a run.

        A flight record holds the last 1024 operations of a communicator. The measured
        time is the median, from the arrival of the last rank to the end of the last.
        Collectives of ``jax.lax`` keep no record.

        Args:
          records: of all processes: :class:`jaxcomm.FlightRecord` values, or files that
            they were saved in; one may stand alone. If None, of this process alone.
            Then the time of groups that span processes includes waiting.

        Returns:
          A sequence of rows, one for each collective, that prints as a table.

        Raises:
          ValueError: if the plan was made without a function, or no record is given.
          TypeError: if a record is of another type.

        Example:
          >>> program = jax.jit(
          ...     jax.shard_map(
          ...         lambda x: jaxcomm.psum(x, "context"),
          ...         mesh=mesh,
          ...         in_specs=jax.P("context"),
          ...         out_specs=jax.P(),
          ...     )
          ... )
          >>> x = jnp.ones((8, 1024))
          >>> made = jaxcomm.plan(mesh, program, x, machine="cpu")
          >>> ran = jax.block_until_ready(program(x))
          >>> checked = made.check()
          >>> checked[0].count, checked[0].seen, checked[0].planned.call.name
          (2, 4, 'psum')
        """
        return check(self, records)

    def to_json(self) -> dict[str, Any]:
        """Return it in types that :mod:`json` writes."""
        return text.to_json(self)

    def __str__(self) -> str:
        """Draw the tables."""
        return text.draw(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return text.as_html(self)
