"""Counting the collectives of a compiled program: whose they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

X = np.arange(8, dtype=np.float32)


def over(mesh, call, out=None):
    split = jax.P("i")
    out = split if out is None else out
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=out))


def counts(mesh, call, out=None):
    return jaxcomm.collectives_of(over(mesh, call, out).lower(X).compile())


def test_ours_and_xla_s_are_told_apart(make_mesh):
    def mixed(x):
        x = jaxcomm.ring_shift(x, "i") + jax.lax.ppermute(x, "i", [(0, 1)])
        return jaxcomm.psum(x, "i") * jax.lax.psum(x * x, "i")

    found = counts(make_mesh(i=4), mixed, jax.P())
    assert found.ours == {"permute": 1, "all_reduce": 1}
    assert found.xla == {"collective-permute": 1, "all-reduce": 1}
    assert found.totals == (2, 2)
    assert str(found) == "2 calls of jaxcomm, 2 collectives of XLA"


def test_a_split_phase_collective_counts_once(make_mesh):
    def split(x):
        handle = jaxcomm.ring_shift_start(x, "i")
        y = jnp.sin(x)
        return handle.done(after=y) + y

    assert counts(make_mesh(i=4), split).ours == {"permute": 1}


def test_the_sum_that_jax_adds_for_a_replicated_input_is_seen(make_mesh):
    mesh = make_mesh(i=4)

    def gradient(cast):
        def local(w, x):
            return jax.grad(lambda w: (cast(w) * x).sum())(w)

        program = jax.shard_map(
            local, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P()
        )
        lowered = jax.jit(program).lower(np.float32(2), X)
        return jaxcomm.collectives_of(lowered.compile()).totals

    assert gradient(lambda w: w) == (0, 1)
    assert gradient(lambda w: jaxcomm.pcast(w, "i", to="varying")) == (1, 0)


@pytest.mark.parametrize("stage", [lambda f: f, lambda f: f.lower(X), lambda f: None])
def test_a_program_that_is_not_compiled_is_refused(make_mesh, stage):
    program = over(make_mesh(i=4), lambda x: x)
    with pytest.raises(TypeError, match=r"collectives_of: expected a compiled program"):
        jaxcomm.collectives_of(stage(program))
