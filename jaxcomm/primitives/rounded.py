"""Numbers as rounded to their type, before anything is computed of them.

XLA compiles what stands next to each other as one loop. There a product and a sum
become one fused multiply-add, which does not round the product, and a bfloat16 keeps
the digits of the float32 that it was made of. What travels to other devices is rounded
always. So a program for one device gives other bits than the same program for two,
unless the one rounds here.
"""

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jaxcomm import compat


def rounded(x: jax.Array) -> jax.Array:
    """Return ``x``, computed apart from what uses it; its tangents, too."""
    return rounded_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _apart(x):
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_apart(x.real), _apart(x.imag))
    # On CPU XLA takes the barrier away before it fuses. LLVM makes no multiply-add of
    # a product that it selects first, and does not know that this selects always.
    selected = jnp.where(x != x, jnp.full_like(x, jnp.nan), x)
    return jax.lax.optimization_barrier(selected)


rounded_p = jax.extend.core.Primitive("jaxcomm_rounded")
rounded_p.def_impl(jax.jit(rounded_p.bind))
rounded_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(rounded_p, lambda ct, x: [rounded(ct)])
batching.primitive_batchers[rounded_p] = lambda operands, dims: (
    rounded_p.bind(*operands),
    dims[0],
)
compat.register_lowering(
    rounded_p, lambda ctx, x: compat.lower_as(lambda x: [_apart(x)], ctx, x)
)
