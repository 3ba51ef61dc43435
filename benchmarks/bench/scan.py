"""Sums and matrix products in a loop: what is left of the gain in a real program."""

import functools
from collections.abc import Iterator, Sequence

import jax

import jaxcomm
from bench import devices as on
from bench import roofline, targets
from bench.cases import TimedCase
from bench.rows import LAX, OURS

SUITE = "scan"
DEVICES = (2, 8)
STEPS = 20
WIDTH = 256
PAYLOAD_BYTES = WIDTH * WIDTH * 4
# Float32 sums in another order, through twenty products.
_TOLERANCE = 1e-4


def cases(devices: Sequence[int] = DEVICES) -> Iterator[TimedCase]:
    """Yield two cases for each mesh.

    Args:
      devices: sizes of the meshes.
    """
    for count in devices:
        for step in (product_of_sum, product_beside_sum):
            yield TimedCase(
                suite=SUITE,
                name=f"{STEPS} x {step.__name__.replace('_', ' ')}",
                devices=count,
                detail=f"{WIDTH} x {WIDTH} x {WIDTH} product",
                payload_bytes=PAYLOAD_BYTES,
                unit=roofline.FLOP,
                work=2.0 * STEPS * count * WIDTH**3,
                target=targets.for_scan(count),
                tolerance=_TOLERANCE,
                build=functools.partial(_build, count, step),
            )


def product_of_sum(psum, weight, carry):
    """Multiply what the sum gives, as a tensor-parallel layer does."""
    x, y = carry
    mean = psum(x, on.AXIS) / jax.lax.axis_size(on.AXIS)
    return (x + mean @ weight) * 0.5, y


def product_beside_sum(psum, weight, carry):
    """Sum and multiply different things, so that the two may overlap."""
    x, y = carry
    mean = psum(x, on.AXIS) / jax.lax.axis_size(on.AXIS)
    return (x + mean) * 0.5, (y + y @ weight) * 0.5


def _build(count, step):
    mesh = on.mesh_of(count)
    split = jax.P(on.AXIS)
    x = on.place(on.normal((count * WIDTH, WIDTH), seed=0), mesh, split)
    # Of norm about one: twenty products neither vanish nor explode.
    weight = on.normal((WIDTH, WIDTH), seed=1) / (2 * WIDTH**0.5)
    weight = on.place(weight, mesh, jax.P())

    def variant(psum):
        def steps(x, weight):
            def body(carry, _):
                return step(psum, weight, carry), None

            return jax.lax.scan(body, (x, x), length=STEPS)[0]

        mapped = jax.shard_map(
            steps, mesh=mesh, in_specs=(split, jax.P()), out_specs=split
        )
        return functools.partial(jax.jit(mapped), x, weight)

    return {OURS: variant(jaxcomm.psum), LAX: variant(jax.lax.psum)}
