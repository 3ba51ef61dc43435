"""Which kernels compute attention in a program."""

import re
from typing import Any

import jax

from jaxcomm.attention.kernels.selection import SCOPE

# A part of an operation's name, not of the name of a file.
_KERNEL = re.compile(rf"[/\"(]{re.escape(SCOPE)}(\w+)(?=[/\")])")


def kernels_of(program: Any) -> frozenset[str]:
    """Say what computes the attention of a program: the names of its kernels.

    They are those that ``implementation=`` takes: ``"flash"``, ``"cudnn"``,
    ``"pallas"`` and ``"xla"``, or the ``name`` of a :class:`Kernel`. A program may have
    several: another for some hops, or under ``vmap``.

    Args:
      program: what ``jax.jit(f).lower(...)`` returns, or its ``.compile()``, or a text
        of either that has the names of operations.

    Returns:
      Empty if the program has no attention of jaxcomm.

    Raises:
      TypeError: it is no program.

    Example:
      >>> @jax.jit
      ... def attend(x):
      ...     return jaxcomm.dot_product_attention(
      ...         x, x, x, axis_name="context", batch_axes="data")
      >>> kernels_of(attend.lower(jnp.ones((2, 16, 2, 8))))
      frozenset({'xla'})
    """
    if isinstance(program, str):
        text = program
    elif isinstance(program, jax.stages.Lowered):
        text = program.as_text(debug_info=True)
    elif isinstance(program, jax.stages.Compiled):
        text = program.as_text() or ""
    else:
        raise TypeError(
            f"kernels_of: expected a lowered or compiled program, got "
            f"{type(program).__name__}. Pass jax.jit(f).lower(...)."
        )
    return frozenset(_KERNEL.findall(text))
