"""Attributes of custom calls that no lowering of ours writes, as an export may have.

An exported program is data from elsewhere: whatever it says, a call gives a result or
raises, and the communicators that were not part of it still work. If it crashes or
hangs, `-n 0 -s` shows the call in its last line.
"""

import random

import catalogue
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["host", "nccl"])
def test_no_attribute_crashes_hangs_or_harms_others(
    request, make_mesh, monkeypatch, backend
):
    if backend == "nccl":
        request.getfixturevalue("with_kernels")
    monkeypatch.setenv("JAXCOMM_TIMEOUT", f"{HANG_SECONDS:g}")
    draw, outcomes = random.Random(len(backend)), {"ran": 0, "raised": 0}
    genuine, choice = jax.ffi.ffi_lowering, catalogue.fixed(SIZE)
    mesh = make_mesh(i=SIZE)
    x = jnp.arange(SIZE * SIZE * 8, dtype=jnp.float32).reshape(SIZE * SIZE, 8)
    total = np.asarray(x).reshape(SIZE, SIZE, 8).sum(0)

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
        with monkeypatch.context() as patch:
            patch.setattr(jax.ffi, "ffi_lowering", ffi_lowering)
            lowered = program.lower(x)
        try:
            jax.block_until_ready(lowered.compile()(x))
            outcomes["ran"] += 1
        except jax.errors.JaxRuntimeError as error:
            outcomes["raised"] += 1
            print("raised", str(error).splitlines()[0][:160], flush=True)
            jaxcomm.finalize()
        np.testing.assert_array_equal(right(x)[:SIZE], total)
    # Both happen: names may be anything, and numbers may not.
    assert min(outcomes.values()) > CALLS // 6, outcomes
