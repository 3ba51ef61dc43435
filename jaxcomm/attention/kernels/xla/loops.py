"""Loops over the tiles that a mask leaves something of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.mask import FULL, SKIP

# Takes a function of whether the tile needs the mask; returns what it returns.
Choose = Callable[[Callable[[bool], Any]], Any]
Step = Callable[[Any, Any, Choose], Any]


def over_visible(step: Step, carry, tiles, modes):
    """Return what ``step`` makes of ``carry``, one visible tile after the other.

    The number of turns is data. So JAX cannot apply reverse mode to it.

    Args:
      step: ``step(carry, tile, choose) -> carry``. What differs with the mask is
        computed by ``choose(compute)``: by ``compute(is_masked)``, a Python bool.
      carry: what the first step takes.
      tiles: a pytree of arrays (tiles, ...).
      modes: int32 (tiles,), of ``Mask.modes``.
    """
    if not modes.size:
        return carry
    order = jnp.argsort(modes == SKIP, stable=True)

    def turn(i, carry):
        def of_turn(x):
            return jax.lax.dynamic_index_in_dim(x, order[i], keepdims=False)

        tile, mode = jax.tree.map(of_turn, (tiles, modes))
        return step(carry, tile, _by(mode))

    return jax.lax.fori_loop(0, (modes != SKIP).sum(), turn, carry)


def over_all(step: Step, carry, tiles, modes):
    """Do what :func:`over_visible` does, in a loop that JAX can differentiate.

    It reads the tiles that it skips. With 16 documents it took twice as long.
    """

    def turn(carry, of):
        tile, mode = of

        def compute(carry):
            return step(carry, tile, _by(mode))

        return jax.lax.cond(mode == SKIP, lambda carry: carry, compute, carry), None

    return jax.lax.scan(turn, carry, (tiles, modes))[0]


def _by(mode) -> Choose:
    def choose(compute):
        return jax.lax.cond(mode == FULL, lambda: compute(False), lambda: compute(True))

    return choose


@dataclasses.dataclass(frozen=True)
class TileLoop:
    """How a hop goes through its tiles.

    Attributes:
      tokens: the most rows of a tile, and the most keys.
      over: the loop, such as :func:`over_visible`.
    """

    tokens: int
    over: Callable


# The scores of a tile, 64 KiB of float32, stay in the cache next to a core. With 512
# tokens the backward pass took a sixth longer, and with documents a third.
ON_CPU = TileLoop(128, over_visible)
# Each tile costs launches, and the host waits for it.
ON_GPU = TileLoop(512, over_visible)
DIFFERENTIABLE = TileLoop(512, over_all)
