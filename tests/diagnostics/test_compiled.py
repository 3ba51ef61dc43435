"""Counting the collectives of a compiled program: whose they are."""

import jax
import numpy as np
import pytest
from models import over

import jaxcomm

SPLIT = jax.P("i")
X = np.arange(8, dtype=np.float32)


def test_ours_and_xla_s_are_told_apart(make_mesh):
    def mixed(x):
        x = jaxcomm.ring_shift(x, "i") + jax.lax.ppermute(x, "i", [(0, 1)])
        return jaxcomm.psum(x, "i") * jax.lax.psum(x * x, "i")

    program = over(make_mesh(i=4), mixed, out=jax.P())
    found = jaxcomm.collectives_of(program.lower(X).compile())
    assert found.ours == {"permute": 1, "all_reduce": 1}
    assert found.xla == {"collective-permute": 1, "all-reduce": 1}
    assert found.totals == (2, 2)
    assert str(found) == "2 calls of jaxcomm, 2 collectives of XLA"


def test_the_sum_that_jax_adds_for_a_replicated_input_is_seen(make_mesh):
    mesh = make_mesh(i=4)

    def gradient(cast):
        def local(w, x):
            return jax.grad(lambda w: (cast(w) * x).sum())(w)

        program = over(mesh, local, (jax.P(), SPLIT), jax.P())
        lowered = program.lower(np.float32(2), X)
        return jaxcomm.collectives_of(lowered.compile()).totals

    assert gradient(lambda w: w) == (0, 1)
    assert gradient(lambda w: jaxcomm.pcast(w, "i", to="varying")) == (1, 0)


def test_a_program_that_is_not_compiled_is_refused(make_mesh):
    program = over(make_mesh(i=4), lambda x: x)
    for stage in (program, program.lower(X), None):
        with pytest.raises(TypeError, match="collectives_of: expected a compiled prog"):
            jaxcomm.collectives_of(stage)
