"""A rank that stays away is an error on the others, and the next program runs.

It stays away by taking the other branch of a cond, or comes once the others have
stopped waiting. So no result depends on how long anything takes.
"""

import jax
import numpy as np
import pytest
import waiting
from models import over

import jaxcomm

X = np.arange(4, dtype=np.float32)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def psum(x):
    return jaxcomm.psum(x, "i")


def without_rank_2(instead):
    return lambda x: jax.lax.cond(jax.lax.axis_index("i") == 2, instead, psum, x)


def with_rank_2_late(x):
    def others_failed():
        communicators = jaxcomm.flight_record().process.communicators
        entries = [entry for each in communicators for entry in each.entries]
        return sum(entry.state == "failed" for entry in entries) >= 3

    def wait(rank):
        if int(rank) == 2:
            waiting.until(others_failed)
        return np.float32(0)

    zero = jax.ShapeDtypeStruct((), np.float32)
    return psum(x + jax.pure_callback(wait, zero, jax.lax.axis_index("i")))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (without_rank_2(lambda x: x),
         ["DEADLINE_EXCEEDED", "psum(float32[1]) over axes ('i',): rank ",
          " of 4 (cpu:", "waited 2 s for rank 2. They may have stopped",
          "JAXCOMM_TIMEOUT"]),
        (without_rank_2(lambda x: jaxcomm.ppermute(x, "i", RING)),
         ["psum(float32[1])", "ppermute(float32[1])", "jax.lax.cond on axis_index"]),
        (with_rank_2_late, ["psum(float32[1])"]),
    ],
    ids=["missing", "different collectives", "late"],
)  # fmt: skip
def test_a_failure_is_an_error_and_the_next_program_runs(make_mesh, call, said):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, timeout=waiting.EXPIRES_SECONDS)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(over(mesh, call, check_vma=False)(X))
    for text in said:
        assert text in str(caught.value)
    # JAX keeps the failure of a callback until the next one.
    following = over(mesh, with_rank_2_late)

    def result():
        # None if it took too long: on a busy machine ranks may come seconds apart.
        try:
            return np.asarray(following(X)).tolist()
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            assert "waited 2 s" in text or "stopped waiting" in text, text

    # The same communicator serves the next program.
    assert waiting.until(result) == [6.0] * 4
    assert [each.stats()["in_flight"] for each in jaxcomm.communicators()] == [0]
