"""Types over mesh axes, in explicit meshes: as jax.lax has them, results and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.primitives.call import call_of

pytestmark = pytest.mark.host_only(reason="types are of the trace, before a backend")

P = jax.P
X = np.arange(16, dtype=np.float32)


@pytest.fixture
def explicit():
    devices = jax.devices()[:4]
    kinds = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=kinds, devices=devices)):
        yield


def over(function, *specs, out=None, check_vma=True):
    split = P("i")
    return jax.shard_map(
        function,
        in_specs=specs or split,
        out_specs=split if out is None else out,
        check_vma=check_vma,
    )


def _weights():
    return 1 + jax.lax.axis_index("i").astype(jnp.float32)


def gathered(lax, x):
    def local(x):
        every = lax.all_gather(x, "i", tiled=True, to="reduced")
        every = lax.pcast(every, "i", to="varying")
        return lax.psum((every**2 * _weights()).sum(), "i")

    return over(local, out=P())(x)


def unreduced(lax, x):
    def local(x):
        terms = lax.pcast(x * _weights(), "i", to="unreduced")
        return lax.psum(terms, "i"), lax.psum_scatter(terms, "i", tiled=True)

    total, parts = over(local, out=(P(), P("i")))(x)
    return (total**3).sum() + (parts**2 * jnp.arange(4.0)).sum()


def reduced(lax, x):
    def local(w, x):
        w = lax.pcast(lax.pcast(w, "i", to="reduced"), "i", to="varying")
        return lax.psum((w * x * _weights()).sum() ** 2, "i")

    return over(local, P(), P("i"), out=P())(jnp.arange(4.0), x)


def reduced_from_outside(lax, x):
    def local(w, x):
        return lax.psum((lax.pcast(w, "i", to="varying") * x).sum() ** 2, "i")

    w = jax.reshard(jnp.arange(4.0), P(reduced={"i"}))
    return over(local, P(reduced={"i"}), P("i"), out=P())(w, x)


PROGRAMS = (gathered, unreduced, reduced, reduced_from_outside)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_gradients_are_those_of_jax_lax(explicit, program):
    x = jax.reshard(jnp.asarray(X), P("i"))
    found, expected = (
        jax.jit(jax.value_and_grad(lambda x, t=twin: program(t, x)))(x)
        for twin in (jaxcomm, jax.lax)
    )
    for one, other in zip(found, expected, strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        # Integers of less than 2^24, and their sums.
        np.testing.assert_allclose(one, other, 1e-6)


def test_the_gradient_of_a_reduced_gather_is_our_reduce_scatter(explicit):
    x = jax.reshard(jnp.asarray(X), P("i"))
    gradient = jax.jit(jax.grad(lambda x: gathered(jaxcomm, x)))
    found = jaxcomm.collectives_of(gradient.lower(x).compile())
    assert found.ours.get("reduce_scatter") == 1
    assert found.xla == {}


def test_types_leave_shard_map_as_those_of_jax_lax_do(explicit):
    x = jax.reshard(jnp.asarray(X), P("i"))
    for call, out in (
        (lambda t, x: t.pcast(x, "i", to="unreduced"), P(unreduced={"i"})),
        (lambda t, x: t.all_gather(x, "i", to="reduced"), P(reduced={"i"})),
    ):
        ours, theirs = (
            jax.typeof(jax.jit(over(lambda x, t=t, c=call: c(t, x), out=out))(x))
            for t in (jaxcomm, jax.lax)
        )
        assert ours == theirs


MISTAKES = {
    "varying to varying": lambda t, x: t.pcast(x, "i", to="varying"),
    "an unknown type": lambda t, x: t.pcast(x, "i", to="nothing"),
    "axes that are a set": lambda t, x: t.psum(x, {"i"}),
    "casting over a set": lambda t, x: t.pcast(x, {"i"}, to="varying"),
    "a sum of what is reduced": lambda t, x: t.psum(
        t.all_gather(x, "i", to="reduced"), "i"
    ),
    "a gather of what is reduced": lambda t, x: t.all_gather(
        t.all_gather(x, "i", to="reduced"), "i", to="reduced"
    ),
    "sending what is unreduced": lambda t, x: t.ppermute(
        t.pcast(x, "i", to="unreduced"), "i", [(0, 1)]
    ),
    "an axis twice": lambda t, x: t.psum(x, ("i", "i")),
    "a gathered axis twice": lambda t, x: t.all_gather(x, ("i", "i")),
    "groups of two sizes": lambda t, x: t.all_gather(
        x, "i", axis_index_groups=[[0, 1, 3], [2]]
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_same_mistake_is_an_exception_of_the_same_type(explicit, mistake):
    x = jax.reshard(jnp.asarray(X), P("i"))

    def raised(twin, check_vma):
        call = over(lambda x: MISTAKES[mistake](twin, x), check_vma=check_vma)
        try:
            jax.jit(call).lower(x)
        except Exception as error:
            return error
        return None

    for check_vma in (True, False):
        ours, theirs = raised(jaxcomm, check_vma), raised(jax.lax, check_vma)
        if theirs is None:
            # jax 0.12 takes the axis to be given once. It says nothing, and we do.
            assert ours is None or "name an axis twice" in str(ours)
            continue
        assert isinstance(ours, type(theirs)), (ours, theirs)
        assert str(ours)


@pytest.mark.skipif(
    not hasattr(jax.sharding, "UnreducedKind"),
    reason="this jax has no unreduced parts of a maximum",
)
def test_parts_of_a_maximum_are_not_added(explicit):
    def local(x):
        aval = jax.typeof(jax.lax.pcast(x, "i", to="unreduced"))
        kind = jax.sharding.UnreducedKind.max
        mat = aval.mat.update(unreduced_kind=kind)
        call = call_of("psum", "i").replace(given="unreduced")
        call.check_kind(aval)
        with pytest.raises(ValueError, match="unreduced in another way, got f32"):
            call.check_kind(aval.update(manual_axis_type=mat))
        return x

    over(local)(jax.reshard(jnp.asarray(X), P("i")))
