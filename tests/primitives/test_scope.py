"""What a program becomes: by arguments and scopes, by nothing that ran before."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over
from waiting import joined

import jaxcomm

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(i=4)


def targets(program):
    text = program.lower(X).as_text()
    return "@jaxcomm" in text


def scaled(x):
    return jaxcomm.ring_shift(x, "i") * 2


def test_one_jitted_function_is_two_programs_inside_and_outside_of_a_scope(mesh):
    program, expected = over(mesh, scaled), np.roll(X, 2) * 2
    counted = []
    for backend in (None, "xla", None):
        with jaxcomm.using(backend=backend):
            np.testing.assert_array_equal(program(X), expected)
            assert targets(program) == (backend is None)
        counted.append(jaxcomm.communicators()[0].stats()["calls"]["permute"])
    assert counted == [1, 1, 2]  # XLA's are not ours to count.


def test_what_is_traced_within_is_not_taken_from_a_cache_of_outside(mesh):
    """Loops, checkpoints and gradients have traces that JAX keeps."""
    inner = jax.checkpoint(lambda x: jaxcomm.psum(jnp.sin(x), "i"))
    nested = jax.jit(lambda x: jaxcomm.all_gather(x, "i", tiled=True).sum())
    moved = jax.custom_vjp(lambda x: jaxcomm.ring_shift(x, "i"))
    moved.defvjp(
        lambda x: (moved(x), None), lambda _, ct: (jaxcomm.ring_shift(ct, "i", -1),)
    )

    def loss(x):
        x = jax.lax.fori_loop(0, 2, lambda _, x: moved(x), x)
        return (inner(x) * x).sum() + nested(x)

    program = over(mesh, jax.grad(loss))
    assert targets(program)
    with jaxcomm.using(backend="xla"):
        assert not targets(program)
        assert not targets(over(mesh, jax.grad(loss)))
    assert targets(program)


def test_an_eager_call_follows_the_scope_too(mesh):
    program = over(mesh, scaled, jit=False)
    for backend in ("host", "xla"):
        with jaxcomm.using(backend=backend):
            program(X)
        assert {c.backend for c in jaxcomm.communicators()} == {backend}
        jaxcomm.finalize()


def test_what_a_call_says_comes_first_and_the_innermost_scope_second(mesh):
    with jaxcomm.using(backend="xla", lane="far"):
        with jaxcomm.using(lane="near"):
            over(mesh, lambda x: jaxcomm.ring_shift(x, "i", backend="host")).lower(X)
        with jaxcomm.using(backend="host"):
            over(mesh, lambda x: jaxcomm.ring_shift(x, "i")).lower(X)
        over(mesh, lambda x: jaxcomm.ring_shift(x, "i", lane="own")).lower(X)
    assert {c.lane for c in jaxcomm.communicators()} == {"near", "far", "own"}


def test_a_scope_ends_with_its_block_and_is_its_thread_s_own(mesh):
    program = over(mesh, scaled)
    with pytest.raises(KeyError), jaxcomm.using(backend="xla"):
        raise KeyError
    assert targets(program)
    found = []
    with jaxcomm.using(backend="xla"):
        thread = threading.Thread(target=lambda: found.append(targets(program)))
        thread.start()
        joined(thread)
    assert found == [True]


def test_a_scope_of_nothing_that_exists_is_refused():
    for options, message in (
        ({"backend": "mpi"}, "using: backend 'mpi' is unknown; choose one of"),
        ({"lane": ""}, "using: lane must be a non-empty string, got ''"),
        ({"lane": 3}, "using: lane must be a non-empty string, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxcomm.using(**options).__enter__()


def test_tracing_asks_neither_the_environment_nor_what_ran_before(mesh, monkeypatch):
    def text():
        return str(jax.make_jaxpr(over(mesh, lambda x: scaled(x)))(X))

    first = text()
    monkeypatch.setenv("JAXCOMM_BACKEND", "xla")
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "700")
    monkeypatch.setenv("JAXCOMM_CHECK", "1")
    assert text() == first
    over(mesh, lambda x: jaxcomm.ring_shift(x, "i", lane="other"))(X)
    over(mesh, lambda x: jaxcomm.ring_shift(x, "i", backend="xla"))(X)
    assert text() == first


def test_what_ran_before_does_not_unsettle_xla_s_collectives(
    mesh, make_mesh, monkeypatch
):
    """Where the variable says xla, a program is portable."""
    jaxcomm.init(make_mesh(other=2), backend="host")
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    over(mesh, lambda x: jaxcomm.ring_shift(x, "i", backend="host"))(X)
    assert {c.backend for c in jaxcomm.communicators()} == {"host"}
    auto = (jax.sharding.AxisType.Auto,)
    abstract = jax.sharding.AbstractMesh((4,), ("i",), auto)
    program = over(abstract, lambda x: jaxcomm.ring_shift(x, "i"))
    assert "backend='xla'" in str(jax.make_jaxpr(program)(X))
