"""What varies over which axes, under check_vma=True."""

import functools

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(reason="types are of the trace, before a backend")


def test_equal_results_may_leave_unsplit_and_varying_ones_may_not(mesh_of):
    mesh = mesh_of((2, 2), ("a", "b"))

    def shape_of(call, out_specs):
        program = jax.shard_map(
            call, mesh=mesh, in_specs=jax.P("a", "b"), out_specs=out_specs
        )
        return jax.eval_shape(program, jax.ShapeDtypeStruct((8, 16), np.float32)).shape

    both, choice = ("a", "b"), catalogue.fixed(4)
    equal = lambda x: jaxcomm.all_gather(x, both, to="invarying")  # noqa: E731
    assert shape_of(equal, jax.P()) == (4, 4, 8)
    varying = {}
    for name, case in catalogue.CASES.items():

        def call(x, axes=both, case=case, **options):
            return case(jaxcomm, x, axes, choice, **options)

        if not case.shared:
            varying[name] = call
            continue
        assert shape_of(call, jax.P()) == (4, 8)
        over_one = functools.partial(call, axes="a")
        assert shape_of(over_one, jax.P(None, "b")) == (4, 16)
        varying[f"{name} over one axis"] = over_one
        varying[f"{name} in groups"] = functools.partial(
            call, axis_index_groups=[[0, 1], [2, 3]]
        )
    for name, call in varying.items():
        with pytest.raises(ValueError, match="out_specs"):
            pytest.fail(f"{name} let through: {shape_of(call, jax.P())}")


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
        def of_rate(x, rate):
            results = [
                *(call(rate, "i") for call in (twin.psum, twin.pmean, twin.pmax)),
                twin.all_gather(rate, "i"),
                twin.ppermute(rate, "i", [(0, 1), (1, 0)]),
            ]
            return [x * result for result in results]

        mesh, split = mesh_of((2,), ("i",)), jax.P("i")
        program = jax.shard_map(
            of_rate, mesh=mesh, in_specs=(split, jax.P()), out_specs=split
        )
        results = jax.eval_shape(jax.jit(program), jnp.ones(2, jnp.bfloat16), 0.5)
        return [each.dtype.name for each in results]

    with jax.numpy_dtype_promotion("standard"):
        assert types(jaxcomm) == types(jax.lax) == ["bfloat16"] * 5


def test_a_ragged_exchange_varies_as_any_of_its_operands(mesh_of):
    """The result holds rows of `output`, which varies over b."""
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


ROWS = np.ones((16, 4), np.float32)


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_gradients_of_replicated_inputs_go_where_their_call_went(make_mesh, backend):
    """The transpose of being typed as varying is a sum: in that lane, that backend."""

    def local(w, x):
        def loss(w):
            total = jaxcomm.pscan(w, "i", lane="grads", backend=backend)
            return (total * x[0]).sum()

        return jax.grad(loss)(w)

    program = jax.shard_map(
        local, mesh=make_mesh(i=4), in_specs=(jax.P(), jax.P("i")), out_specs=jax.P()
    )
    jax.block_until_ready(jax.jit(program)(ROWS[0], ROWS))
    assert {(c.lane, c.backend) for c in jaxcomm.communicators()} == {
        ("grads", backend)
    }


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_integers_typed_along_with_a_float_have_no_gradient(make_mesh, backend):
    """A custom_vjp gives integers cotangents of float0, which nothing can sum."""

    @jax.custom_vjp
    def scaled(x, i):
        return x * i.astype(x.dtype)

    def forward(x, i):
        return scaled(x, i), i

    scaled.defvjp(forward, lambda i, ct: (ct * i.astype(ct.dtype), None))

    def local(x, i):
        return jaxcomm.psum(scaled(*jaxcomm.pcast((x, i), "i", to="varying")), "i")

    program = jax.shard_map(
        local, mesh=make_mesh(i=2), in_specs=(jax.P(), jax.P()), out_specs=jax.P()
    )
    i = np.arange(4, dtype=np.int32)
    with jaxcomm.using(backend=backend):
        gradient = jax.jit(jax.grad(lambda x: program(x, i).sum()))(ROWS[0])
    np.testing.assert_array_equal(gradient, 2 * i)
