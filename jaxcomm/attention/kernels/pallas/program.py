"""What the attention kernels share: their operands, blocks, loops and products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm import compat
from jaxcomm.attention.kernels.pallas.work import Sizes, Visits, Work


def walk(visits: Visits, visit, carry):
    """Visit the tiles that are whole, then those that need the mask."""
    whole, visible = visits.counts[0], visits.counts[1]
    carry = jax.lax.fori_loop(0, whole, visit(False), carry)
    return jax.lax.fori_loop(whole, visible, visit(True), carry)


def product(a, b):
    """Return the product of two matrices in float32."""
    # Else a GPU rounds float32 to 11 bits.
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def divide(number, by: int):
    """Divide a number that is not negative; Triton has no ``%`` of both signs."""
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def read(refs, at: Any = ...):
    """Read the refs of a pytree."""
    return jax.tree.map(lambda ref: ref[at], refs)


def operands_of(work: Work, visits: Visits | None):
    """Return the operands of all kernels."""
    return (
        *(visits, work.queries, work.keys, work.slopes, work.seeds, work.bias),
        *(work.query, work.key, work.value),
    )


def float32_of(*shape):
    """Return the type of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def visit_specs(work: Work, visits: Visits) -> Visits:
    """Return the blocks of the tiles that a program visits."""
    batch = work.of_batch(visits.counts)

    def spec(x):
        return pl.BlockSpec((None, None, x.shape[2]), lambda i, h, b: (batch(b), i, 0))

    return Visits(*map(spec, visits))


def common_specs(work: Work, visits: Visits):
    """Return the blocks of visits, tokens and terms of a program for queries."""

    def per_head(x):
        if x is None:
            return None
        return pl.BlockSpec((None, None), lambda i, h, b: (b, h))

    return (
        visit_specs(work, visits),
        work.token_specs(work.queries, work.sizes.queries, lambda i, h, b: (b, i)),
        work.token_specs(work.keys, None, lambda i, h, b: (b, 0)),
        *(per_head(work.slopes), per_head(work.seeds)),
        work.bias_spec(None, work.sizes.queries, None, lambda i, h, b: (b, h, i, 0)),
    )


def row_specs(work: Work):
    """Return a function that gives the block of a program's queries."""

    def spec(x):
        block = (None, work.sizes.queries, None, x.shape[3])
        return pl.BlockSpec(block, lambda i, h, b: (b, i, h, 0))

    return spec


def columns_spec(work: Work, x):
    """Return the block of all keys, or values, that a program's queries may see."""
    group = work.group
    block = (None, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(block, lambda i, h, b: (b, 0, h // group, 0))


def call_kernel(kernel, *, sizes: Sizes, interpret: bool, **options):
    """Return ``pallas_call`` of a kernel, for Triton or interpreted."""
    return pl.pallas_call(
        kernel,
        compiler_params=compat.triton_parameters(
            warps=sizes.warps, stages=sizes.stages
        ),
        interpret=interpret,
        **options,
    )
