"""What the backward pass keeps, by the name that ``jax.checkpoint`` policies know."""

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "jaxcomm_attention"


def keep(tree):
    """Name the arrays of a pytree, so that a policy can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), tree)
