"""Derivatives and batches go through the lane and backend of the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

LANE = {"lane": "other"}
PAIRS = [(0, 1), (1, 2), (2, 3), (3, 0)]


def ragged(x, **o):
    idx = jnp.arange(4)
    one = jnp.ones(4, jnp.int32)
    where = jax.lax.axis_index("i") * one
    return jaxcomm.ragged_all_to_all(x, x * 2, idx, one, where, one, axis_name="i", **o)


CALLS = {
    "psum": lambda x, **o: jaxcomm.psum(x, "i", **o),
    "pmean": lambda x, **o: jaxcomm.pmean(x, "i", **o),
    "pmax": lambda x, **o: jaxcomm.pmax(x, "i", **o),
    "pprod": lambda x, **o: jaxcomm.pprod(x, "i", **o),
    "all_gather": lambda x, **o: jaxcomm.all_gather(x, "i", **o),
    "psum_scatter": lambda x, **o: jaxcomm.psum_scatter(x, "i", **o),
    "all_to_all": lambda x, **o: jaxcomm.all_to_all(x, "i", 0, 0, **o),
    "ragged": ragged,
    "ppermute": lambda x, **o: jaxcomm.ppermute(x, "i", PAIRS, **o),
    "broadcast": lambda x, **o: jaxcomm.pbroadcast(x, "i", 1, **o),
    "reduce": lambda x, **o: jaxcomm.preduce(x, "i", 1, **o),
    "reduce max": lambda x, **o: jaxcomm.preduce(x, "i", 1, op="max", **o),
    "gather": lambda x, **o: jaxcomm.pgather(x, "i", 1, **o),
    "scatter": lambda x, **o: jaxcomm.pscatter(x, "i", 1, **o),
    "scan": lambda x, **o: jaxcomm.pscan(x, "i", **o),
    "scan prod": lambda x, **o: jaxcomm.pscan(x, "i", op="prod", **o),
    "barrier": lambda x, **o: jaxcomm.pbarrier(x, "i", **o),
    "pcast": lambda x, **o: jaxcomm.pcast(x, "i", to="varying", **o),
    "ppermute_start": lambda x, **o: jaxcomm.ppermute_start(x, "i", PAIRS, **o).done(),
    "psum_start": lambda x, **o: jaxcomm.psum_start(x, "i", **o).done(),
    "all_gather_start": lambda x, **o: jaxcomm.all_gather_start(x, "i", **o).done(),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_go_through_the_lane_of_the_call(make_mesh, name, check_vma):
    mesh = make_mesh(i=4)

    def local(w, x):
        # Of parameters that all ranks share, too, marked in that lane.
        def of(w, x):
            w = jaxcomm.pcast(w, "i", to="varying", **LANE)
            return (w * x if name == "pcast" else jnp.sin(call(w * x))).sum()

        def call(x):
            return CALLS[name](x, **LANE)

        grads = jax.grad(of, (0, 1))(w, x)
        second = jax.grad(lambda x: (jax.grad(of, 1)(w, x) ** 2).sum())(x)
        return grads, second

    spec = jax.P("i")
    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), spec),
        out_specs=((jax.P() if check_vma else spec, spec), spec),
        check_vma=check_vma,
    )
    text = (
        jax.jit(program)
        .lower(np.ones(4, np.float32), np.ones(16, np.float32))
        .as_text()
    )
    assert {c.lane for c in jaxcomm.communicators()} <= {"other"}
    for op in ('all_reduce"', 'all_gather"', 'reduce_scatter"', 'collective_permute"'):
        assert f'"stablehlo.{op}' not in text


@pytest.mark.parametrize(
    "name", ["psum", "all_gather", "ppermute", "scan", "psum_scatter"]
)
def test_vmap_over_one_of_two_axes_keeps_the_lane(make_mesh, name):
    mesh = make_mesh(i=2)
    calls = {
        "psum": lambda x: jaxcomm.psum(x, ("i", "v"), **LANE),
        "all_gather": lambda x: jaxcomm.all_gather(x, ("i", "v"), **LANE),
        "ppermute": lambda x: jaxcomm.ppermute(x, ("i", "v"), PAIRS, **LANE),
        "scan": lambda x: jaxcomm.pscan(x, ("i", "v"), **LANE),
        "psum_scatter": lambda x: jaxcomm.psum_scatter(x, ("i", "v"), **LANE),
    }
    f = jax.shard_map(
        lambda x: jax.vmap(calls[name], axis_name="v")(x),
        mesh=mesh,
        in_specs=jax.P("i"),
        out_specs=jax.P("i"),
        check_vma=False,
    )
    jax.jit(f).lower(np.ones((4, 4), np.float32))
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_stay_with_the_backend_of_the_call(make_mesh, name):
    mesh = make_mesh(i=4)

    def local(w, x):
        def of(w, x):
            w = jaxcomm.pcast(w, "i", to="varying", backend="xla")
            if name == "pcast":
                return (w * x).sum()
            return jnp.sin(CALLS[name](w * x, backend="xla")).sum()

        return jax.grad(of, (0, 1))(w, x)

    spec = jax.P("i")
    program = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(), spec), out_specs=(jax.P(), spec)
    )
    text = (
        jax.jit(program)
        .lower(np.ones(4, np.float32), np.ones(16, np.float32))
        .as_text()
    )
    assert "@jaxcomm" not in text
    assert all(c.backend == "xla" for c in jaxcomm.communicators())


def test_the_gradient_of_what_all_ranks_share_goes_through_the_ring_s_lane(make_mesh):
    mesh = make_mesh(i=4)

    def local(w, x):
        def loss(w, x):
            q = jnp.broadcast_to(w, (1, 4, 2, 8))  # the same on all ranks
            layout = jaxcomm.Layout("zigzag", 4, 16)
            held = layout.positions_of(jax.lax.axis_index("i"))
            out = jaxcomm.ring_attention(
                q, x, x, axis_name="i", layout=layout, positions=held, lane="other"
            )
            return (out**2).sum()

        return jax.grad(loss)(w, x)

    program = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(), jax.P(None, "i")), out_specs=jax.P()
    )
    jax.jit(program).lower(np.ones(8, np.float32), np.ones((1, 16, 2, 8), np.float32))
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}
