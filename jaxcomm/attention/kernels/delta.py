"""The gradient of the log-sum-exp, from kernels that know of none."""

import jax
import jax.numpy as jnp

# The units of the parts of a float32 number, whose range is beyond float16's.
_PARTS = (2.0**10, 1.0, 2.0**-10, 2.0**-20)
# By how many columns heads grow. Kernels take head sizes that are multiples of it.
COLUMNS = 8


def with_delta(query, key, value, out, grad_out, delta):
    """Extend the heads so that a kernel subtracts ``delta`` and not its own.

    The gradient of a score is weight * (grad_out . value - out . grad_out), and its
    last term lacks the gradient of lse. So out becomes 0, and columns join the heads
    whose product is -delta, in parts, as one number of the short dtype would round it.
    Query and key have 0 there, and do not notice.
    """
    info = jnp.finfo(query.dtype)
    parts, rest = [], delta
    for unit in _PARTS:
        # Unlike a cast to and fro, XLA may not drop it.
        part = jax.lax.reduce_precision(rest / unit, info.nexp, info.nmant)
        parts.append(-part)
        rest = rest - part * unit
    columns = jnp.stack(parts, -1).astype(grad_out.dtype)
    units = jnp.asarray(_PARTS, value.dtype)

    def extend(x, columns):
        padding = [(0, 0)] * (x.ndim - 1) + [(0, COLUMNS - columns.shape[-1])]
        return jnp.concatenate([x, jnp.pad(columns, padding)], -1)

    def zeros(x):
        return jnp.zeros_like(x[..., : columns.shape[-1]])

    return (
        extend(query, zeros(query)),
        extend(key, zeros(key)),
        extend(value, zeros(value) + units),
        extend(jnp.zeros_like(out), zeros(out)),
        extend(grad_out, columns),
    )
