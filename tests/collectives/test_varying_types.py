"""What varies over which axes, under check_vma=True."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


def test_equal_results_may_leave_unsplit_and_varying_ones_may_not(mesh_of):
    mesh = mesh_of((2, 2), ("a", "b"))

    def shape_of(call, out_specs):
        program = jax.shard_map(
            call, mesh=mesh, in_specs=jax.P("a", "b"), out_specs=out_specs
        )
        return jax.eval_shape(program, jax.ShapeDtypeStruct((8, 16), np.float32)).shape

    both, choice = ("a", "b"), catalogue.fixed(4)
    cases = [case for case in catalogue.CASES.values() if case.shared]
    for case in cases:
        call = getattr(jaxcomm, case.function)
        assert shape_of(lambda x: call(x, both), jax.P()) == (4, 8)  # noqa: B023
        assert shape_of(lambda x: call(x, "a"), jax.P(None, "b")) == (4, 16)  # noqa: B023
        with pytest.raises(ValueError, match="out_specs"):
            shape_of(lambda x: call(x, "a"), jax.P())  # noqa: B023
    equal = lambda x: jaxcomm.all_gather(x, both, to="invarying")  # noqa: E731
    assert shape_of(equal, jax.P()) == (4, 4, 8)
    varying = {
        name: lambda x, case=case: case(jaxcomm, x, both, choice)
        for name, case in catalogue.CASES.items()
        if not case.shared
    }
    varying |= {
        f"{case.name} in groups": lambda x, case=case: case(
            jaxcomm, x, both, choice, axis_index_groups=[[0, 1], [2, 3]]
        )
        for case in cases
    }
    refusals = {}
    for name, call in varying.items():
        try:
            shape = shape_of(call, jax.P())
        except ValueError as error:
            refusals[name] = str(error)
        else:
            refusals[name] = f"let through with shape {shape}"
    assert {n: text for n, text in refusals.items() if "out_specs" not in text} == {}


def test_the_types_are_those_of_jax_lax(mesh_of):
    """Beside the values' own axes: an unvarying operand varies after all_gather."""
    mesh = mesh_of((2, 2), ("a", "b"))

    def types_of(lib):
        seen = {}

        def local(x, w):
            calls = {
                "psum": lib.psum(x, "a"),
                "pmax": lib.pmax(x, ("a", "b")),
                "all_gather": lib.all_gather(x, "b"),
                "psum_scatter": lib.psum_scatter(x, "a"),
                "all_to_all": lib.all_to_all(x, "a", 0, 0, tiled=True),
                "ppermute": lib.ppermute(x, "b", [(0, 1)]),
                "psum of equal values": lib.psum(w, "a"),
                "all_gather of equal values": lib.all_gather(w, "a"),
                "ppermute of equal values": lib.ppermute(w, "a", [(0, 1)]),
            }
            seen.update({name: jax.typeof(out) for name, out in calls.items()})
            return x

        program = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(jax.P("a", "b"), jax.P()),
            out_specs=jax.P("a", "b"),
        )
        struct = jax.ShapeDtypeStruct((4, 4), np.float32)
        jax.eval_shape(program, struct, struct)
        return {n: (t.shape, t.dtype, t.mat.varying) for n, t in seen.items()}

    assert types_of(jaxcomm) == types_of(jax.lax)


def test_numbers_of_no_type_of_their_own_stay_so(mesh_of):
    """As with jax.lax: a rate that was averaged does not make float32 of bfloat16."""

    def types(twin):
        def function(x, rate):
            ring = [(0, 1), (1, 0)]
            of_rate = (
                twin.psum(rate, "i"),
                twin.pmean(rate, "i"),
                twin.pmax(rate, "i"),
                twin.all_gather(rate, "i"),
                twin.ppermute(rate, "i", ring),
            )
            return [(x * r).dtype.name for r in of_rate]

        found = []

        def traced(x, rate):
            found.extend(function(x, rate))
            return x

        jax.jit(
            jax.shard_map(
                traced,
                mesh=mesh_of((2,), ("i",)),
                in_specs=(jax.P("i"), jax.P()),
                out_specs=jax.P("i"),
            )
        )(jnp.ones(2, jnp.bfloat16), 0.5)
        return found

    with jax.numpy_dtype_promotion("standard"):
        assert types(jaxcomm) == types(jax.lax) == ["bfloat16"] * 5


def test_a_ragged_exchange_varies_as_any_of_its_operands(mesh_of):
    """J2: the result holds rows of `output`, which varies over b."""
    mesh = mesh_of((2, 2), ("a", "b"))
    index = jnp.arange(2)

    def call(x, out):
        return jaxcomm.ragged_all_to_all(
            x, out, index, jnp.ones(2, int), index, jnp.ones(2, int), axis_name="a"
        )

    program = jax.shard_map(
        call, mesh=mesh, in_specs=(jax.P("a"), jax.P("a", "b")), out_specs=jax.P("a")
    )
    struct = jax.ShapeDtypeStruct((4, 4), np.float32)
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(program, jax.ShapeDtypeStruct((4, 2), np.float32), struct)
