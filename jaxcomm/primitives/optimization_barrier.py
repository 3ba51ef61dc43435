"""An optimization barrier whose results are as replicated as its operands.

In jax 0.10 the results of ``jax.lax.optimization_barrier`` vary over all axes over
which any operand does. ``shard_map`` then forgets that a sum is equal on all devices.
"""

import jax
import jax.extend
from jax.interpreters import ad, batching

from jaxcomm import compat

# Not "jaxcomm_barrier", which is the collective.
barrier_p = jax.extend.core.Primitive("jaxcomm_optimization_barrier")
barrier_p.multiple_results = True


def barrier(xs):
    """Return the pytree ``xs``; each of its arrays is available once all are."""
    leaves, tree = jax.tree.flatten(xs)
    return jax.tree.unflatten(tree, barrier_p.bind(*leaves))


def _jvp(primals, tangents):
    outs = barrier_p.bind(*primals)
    moving = [i for i, t in enumerate(tangents) if not compat.is_zero_tangent(t)]
    out_tangents = list(map(compat.zero_tangent, outs))
    if moving:
        moved = barrier_p.bind(*(tangents[i] for i in moving))
        for i, tangent in zip(moving, moved, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _transpose(cts, *operands):
    known = [i for i, ct in enumerate(cts) if not compat.is_zero_tangent(ct)]
    outs = list(cts)
    if known:
        moved = barrier_p.bind(*(cts[i] for i in known))
        for i, ct in zip(known, moved, strict=True):
            outs[i] = ct
    return outs


def _lower(ctx, *operands):
    return compat.lower_as(lambda *xs: jax.lax.optimization_barrier(xs), ctx, *operands)


barrier_p.def_impl(jax.jit(barrier_p.bind))
barrier_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[barrier_p] = _jvp
ad.primitive_transposes[barrier_p] = _transpose
batching.primitive_batchers[barrier_p] = lambda operands, dims: (
    barrier_p.bind(*operands),
    dims,
)
compat.register_lowering(barrier_p, _lower)
