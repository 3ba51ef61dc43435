"""What all strategies share: sinks, casts, and the derivative as one function."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.merge import merge
from jaxcomm.attention.names import keep
from jaxcomm.attention.permutation import poison_unless
from jaxcomm.attention.promotion import promotes_ranks
from jaxcomm.attention.strategies.strategy import Call, Inputs, Saved
from jaxcomm.primitives.call import SCOPE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, inputs: Inputs, sinks, is_right):
    """Attend by the strategy of the call.

    Args:
      call: what is known before.
      inputs: the arrays of this rank.
      sinks: (N,) in the dtype of sums, or None.
      is_right: bool scalar, whether this rank holds the tokens that its layout says, or
        None if it does. Otherwise results and gradients are NaN here, and on each rank
        that sees a key of this one. Tokens that are padding by their segment ids may
        give 0.

    Returns:
      (out, lse): (B, T, N, V) in the dtype of the query, (B, T, N) in that of sums.
    """
    return _forward(call, inputs, sinks, is_right)[0]


@promotes_ranks
def _forward(call: Call, inputs: Inputs, sinks, is_right):
    inputs = inputs._replace(key=poison_unless(is_right, inputs.key))
    # JAX traces both rules when it differentiates: the caller's scope may be gone.
    with SCOPE(call.scope):
        (out, lse), kept = call.strategy.forward(call, inputs)
    if sinks is not None:
        # A sink is a key that every row sees, with a value of zeros.
        of_sinks = jnp.broadcast_to(sinks, lse.shape)
        out = out.astype(lse.dtype)
        out, lse = merge(out, lse, jnp.zeros_like(out), of_sinks)
    out = out.astype(inputs.query.dtype)
    if not _all_see_themselves(call, out):
        out = poison_unless(is_right, out)
    out, lse = keep((out, poison_unless(is_right, lse)))
    return (out, lse), (kept, out, lse, sinks, is_right)


def _all_see_themselves(call: Call, out) -> bool:
    """Say whether results of wrong tokens are NaN without a pass over each.

    A query sees its own key, which is NaN then; and a key's weights are NaN if the
    log-sum-exp is. Not of padding, which sees nothing.
    """
    return call.is_self and call.mask.query_length == call.size * out.shape[1]


@promotes_ranks
def _backward(call: Call, residuals, grads):
    kept, out, lse, sinks, is_right = residuals
    grad_out, grad_lse = grads
    # Once, not per hop. A score moves lse by its weight, hence the second term.
    delta = (grad_out.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1) - grad_lse
    with SCOPE(call.scope):
        found = call.strategy.backward(call, kept, Saved(grad_out, out, lse, delta))
    grad_sinks = None
    if sinks is not None:
        # Where both are -inf the row saw nothing, not even a sink.
        weights = jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks - lse))
        grad_sinks = -(weights * delta).sum((0, 1))
    dtype = out.dtype
    bias = found.bias
    if bias is not None:
        bias = bias.astype(call.bias_dtype)
    grads = (
        Inputs(
            query=found.query.astype(dtype),
            key=found.key.astype(dtype),
            value=found.value.astype(dtype),
            query_ids=None,
            key_ids=None,
            bias=bias,
            slopes=found.slopes,
            seeds=None,
            query_layout=None,  # pyright: ignore[reportArgumentType]
            key_layout=None,  # pyright: ignore[reportArgumentType]
        ),
        grad_sinks,
    )
    if not _all_see_themselves(call, out):
        grads = poison_unless(is_right, grads)
    return *grads, None


_attend.defvjp(_forward, _backward)
# Where the caller compiles nothing, JAX compiles every operation by itself, and loops
# anew at each call: this makes one of all.
attend = jax.jit(_attend, static_argnums=0)
