"""Runs every collective with attributes that no lowering writes; a program.

An exported program is data from elsewhere: whatever it says, a call gives a result or
raises, and the communicators that were not part of it still work. A crash or a hang
ends this process, which the test that started it sees; the last line names the call.
"""

import json
import random
import sys

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
from models import over

import jaxcomm

SIZE = 4
NUMBERS = (
    *(-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 1 << 20),
    *(1 << 31, -(1 << 31), (1 << 32) + 1, 1 << 62, -(1 << 62), (1 << 63) - 1),
    -(1 << 63),
)
WORDS = ("", "sum", "max", "prod", "all_reduce", "permute", "x" * 5000, "\0", "ü")


def mutated(attributes, draw):
    """Return one of the attributes as another, or with another number in ``params``."""
    name = draw.choice(sorted(attributes))
    if isinstance(attributes[name], str):
        return {name: draw.choice(WORDS)}
    if name != "params":
        return {name: np.int64(draw.choice(NUMBERS))}
    params = attributes[name].tolist()
    what = draw.randrange(4)
    if what == 0:
        del params[draw.randrange(len(params) + 1) :]
    elif what == 1:
        params += [draw.choice(NUMBERS) for _ in range(draw.randrange(1, 9))]
    elif params:
        params[draw.randrange(len(params))] = draw.choice(NUMBERS)
    return {name: np.asarray(params, np.int64)}


def main(seed, count):
    """Run ``count`` mutated calls, drawn from ``seed``."""
    draw = random.Random(seed)
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:SIZE]
    mesh = jax.make_mesh((SIZE,), ("i",), axis_types=auto, devices=devices)
    genuine = jax.ffi.ffi_lowering
    x = jnp.arange(SIZE * SIZE * 8, dtype=jnp.float32).reshape(SIZE * SIZE, 8)
    choice = catalogue.fixed(SIZE)
    outcomes = {"ran": 0, "raised": 0}

    def compile_sum():
        return over(mesh, lambda x: jaxcomm.psum(x, "i"))

    def ffi_lowering(*args, **options):
        rule = genuine(*args, **options)

        def lower(ctx, *operands, **attributes):
            changed = mutated(attributes, draw)
            print(str(changed)[:300], end=" ", flush=True)
            return rule(ctx, *operands, **attributes | changed)

        return lower

    right = compile_sum()
    for _ in range(count):
        case = draw.choice(list(catalogue.CASES.values()))
        print(case.name, end=" ", flush=True)
        program = over(
            mesh, lambda x, c=case: c(jaxcomm, x, "i", choice), check_vma=False
        )
        jax.ffi.ffi_lowering = ffi_lowering
        try:
            lowered = program.lower(x)
        finally:
            jax.ffi.ffi_lowering = genuine
        try:
            jax.block_until_ready(lowered.compile()(x))
            outcomes["ran"] += 1
            print("ran", flush=True)
        except jax.errors.JaxRuntimeError as error:
            outcomes["raised"] += 1
            print("raised", str(error).splitlines()[0][:160], flush=True)
            jaxcomm.finalize()
            right = compile_sum()
        np.testing.assert_array_equal(
            right(x)[:SIZE], np.asarray(x).reshape(SIZE, SIZE, 8).sum(0)
        )
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
