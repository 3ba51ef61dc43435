"""Attributes of custom calls that no lowering of ours writes, as an export may have.

An exported program is data from elsewhere: whatever it says, a call gives a result or
raises, and the communicators that were not part of it still work. A crash or a hang
ends the process in which this file is a program; its last line names the call.
"""

import json
import os
import random
import sys

import catalogue
import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over
from waiting import HANG_SECONDS

import jaxcomm

SIZE = 4
CALLS = 40
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 63, 1 << 20, 1 << 31, -(1 << 31), (1 << 32) + 1)
NUMBERS += (1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63))
WORDS = ("", "sum", "max", "prod", "all_reduce", "permute", "x" * 5000, "\0", "ü")


def mutated(attributes, draw):
    """Return one of the attributes as another, or with another number in ``params``."""
    name = draw.choice(sorted(attributes))
    if isinstance(attributes[name], str):
        return {name: draw.choice(WORDS)}
    if name != "params":
        return {name: np.int64(draw.choice(NUMBERS))}
    params = attributes[name].tolist()
    what = draw.randrange(3)
    if what == 0:
        del params[draw.randrange(len(params) + 1) :]
    elif what == 1 or not params:
        params += [draw.choice(NUMBERS) for _ in range(draw.randrange(1, 9))]
    else:
        params[draw.randrange(len(params))] = draw.choice(NUMBERS)
    return {name: np.asarray(params, np.int64)}


def main(seed):
    draw, outcomes = random.Random(seed), {"ran": 0, "raised": 0}
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:SIZE]
    mesh = jax.make_mesh((SIZE,), ("i",), axis_types=auto, devices=devices)
    genuine, choice = jax.ffi.ffi_lowering, catalogue.fixed(SIZE)
    x = jnp.arange(SIZE * SIZE * 8, dtype=jnp.float32).reshape(SIZE * SIZE, 8)

    def ffi_lowering(*args, **options):
        rule = genuine(*args, **options)

        def lower(ctx, *operands, **attributes):
            changed = mutated(attributes, draw)
            print(str(changed)[:300], end=" ", flush=True)
            return rule(ctx, *operands, **attributes | changed)

        return lower

    for _ in range(CALLS):
        right = over(mesh, lambda x: jaxcomm.psum(x, "i"))
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
        except jax.errors.JaxRuntimeError as error:
            outcomes["raised"] += 1
            print("raised", str(error).splitlines()[0][:160], flush=True)
            jaxcomm.finalize()
        total = np.asarray(x).reshape(SIZE, SIZE, 8).sum(0)
        np.testing.assert_array_equal(right(x)[:SIZE], total)
    print("\n" + json.dumps(outcomes))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", ["host", "nccl"])
def test_no_attribute_crashes_hangs_or_harms_others(request, backend):
    variables = {"JAXCOMM_TIMEOUT": f"{HANG_SECONDS:g}"}
    if backend == "nccl":
        variables |= {
            "JAXCOMM_NCCL_LIBRARY": request.getfixturevalue("stand_in_path"),
            "JAXCOMM_BACKEND": "nccl",
            "JAXCOMM_FAKE_KERNELS": "1",
        }
    done = forked.run(
        [sys.executable, __file__, str(len(backend))],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    # Both happen: names may be anything, and numbers may not.
    assert sum(outcomes.values()) == CALLS
    assert min(outcomes.values()) > CALLS // 6, outcomes


if __name__ == "__main__":
    main(int(sys.argv[1]))
