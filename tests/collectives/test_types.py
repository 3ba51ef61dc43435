"""Types over mesh axes: as jax.lax has them, results and errors."""

import functools

import catalogue
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm

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


def gathered(lax, w, x):
    every = lax.all_gather(x, "i", tiled=True, to="reduced")
    every = lax.pcast(every, "i", to="varying")
    return lax.psum((every**2 * _weights()).sum(), "i")


def unreduced(lax, w, x):
    terms = lax.pcast(x * _weights(), "i", to="unreduced")
    parts = lax.psum_scatter(terms, "i", tiled=True)
    total = lax.psum(terms, "i") + lax.pmean(terms, "i")
    return (total**3).sum() + lax.psum((parts**2 * _weights()).sum(), "i")


def reduced(lax, w, x):
    w = lax.pcast(lax.pcast(w, "i", to="reduced"), "i", to="varying")
    return lax.psum((w * x * _weights()).sum() ** 2, "i")


def reduced_from_outside(lax, w, x):
    return lax.psum((lax.pcast(w, "i", to="varying") * x).sum() ** 2, "i")


PROGRAMS = (gathered, unreduced, reduced, reduced_from_outside)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_gradients_are_those_of_jax_lax(explicit, program):
    spec = P(reduced={"i"}) if program is reduced_from_outside else P()
    w, x = jax.reshard(jnp.arange(4.0), spec), jax.reshard(jnp.asarray(X), P("i"))
    found, expected = (
        jax.jit(jax.value_and_grad(over(loss, spec, P("i"), out=P()), 1))
        for loss in (functools.partial(program, lib) for lib in (jaxcomm, jax.lax))
    )
    for one, other in zip(found(w, x), expected(w, x), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        # Integers of less than 2^24, and their sums.
        np.testing.assert_allclose(one, other, 1e-6)
    if program is gathered:
        calls = jaxcomm.collectives_of(found.lower(w, x).compile())
        assert calls.ours.get("reduce_scatter") == 1
        assert calls.xla == {}


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
        assert isinstance(ours, type(theirs)), (ours, theirs)
        assert str(ours)


ROWS = np.ones((4, 4), np.float32)


def test_equal_results_may_leave_unsplit_and_varying_ones_may_not(mesh_of):
    mesh = mesh_of((2, 2), ("a", "b"))

    def shape_of(call, out):
        program = models.over(mesh, call, P("a", "b"), out)
        return jax.eval_shape(program, np.ones((8, 16), np.float32)).shape

    both, choice = ("a", "b"), catalogue.fixed(4)
    equal = lambda x: jaxcomm.all_gather(x, both, to="invarying")  # noqa: E731
    assert shape_of(equal, P()) == (4, 4, 8)
    varying = {}

    def calling(case, axes=both, **options):
        return lambda x: case(jaxcomm, x, axes, choice, **options)

    for name, case in catalogue.CASES.items():
        if not case.shared:
            varying[name] = calling(case)
            continue
        assert shape_of(calling(case), P()) == (4, 8)
        assert shape_of(calling(case, "a"), P(None, "b")) == (4, 16)
        groups = {"axis_index_groups": [[0, 1], [2, 3]]}
        varying[f"{name} over one axis"] = calling(case, "a")
        varying[f"{name} in groups"] = calling(case, **groups)
    for name, call in varying.items():
        with pytest.raises(ValueError, match="out_specs"):
            pytest.fail(f"{name} let through: {shape_of(call, P())}")

    def ragged(x):
        # The result holds rows of the output, which varies over b.
        index = jnp.arange(2), jnp.ones(2, int), jnp.arange(2), jnp.ones(2, int)
        return jaxcomm.ragged_all_to_all(jaxcomm.psum(x, "b"), x, *index, axis_name="a")

    with pytest.raises(ValueError, match="out_specs"):
        shape_of(ragged, P("a"))


def test_numbers_of_no_type_of_their_own_stay_so(mesh_of):
    """As with jax.lax: a rate that was averaged does not make float32 of bfloat16."""

    def types(twin):
        def of_rate(x, rate):
            results = [
                *(call(rate, "i") for call in (twin.psum, twin.pmean, twin.pmax)),
                twin.all_gather(rate, "i"),
                twin.ppermute(rate, "i", [(0, 1), (1, 0)]),
            ]
            return [x * result for result in results]

        program = models.over(mesh_of((2,), ("i",)), of_rate, (P("i"), P()))
        results = jax.eval_shape(program, jnp.ones(2, jnp.bfloat16), 0.5)
        return [each.dtype.name for each in results]

    with jax.numpy_dtype_promotion("standard"):
        assert types(jaxcomm) == types(jax.lax) == ["bfloat16"] * 5


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_integers_typed_along_with_a_float_have_no_gradient(make_mesh, backend):
    """A custom_vjp gives integers cotangents of float0, which nothing can sum."""

    @jax.custom_vjp
    def scaled(x, i):
        return x * i.astype(x.dtype)

    scaled.defvjp(
        lambda x, i: (scaled(x, i), i), lambda i, ct: (ct * i.astype(ct.dtype), None)
    )

    def local(x, i):
        return jaxcomm.psum(scaled(*jaxcomm.pcast((x, i), "i", to="varying")), "i")

    program = models.over(make_mesh(i=2), local, P(), P())
    i = np.arange(4, dtype=np.int32)
    with jaxcomm.using(backend=backend):
        gradient = jax.jit(jax.grad(lambda x: program(x, i).sum()))(ROWS[0])
    np.testing.assert_array_equal(gradient, 2 * i)
