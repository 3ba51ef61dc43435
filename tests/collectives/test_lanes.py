"""Derivatives and batches go through the lane and backend of the call."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

LANE = {"lane": "other"}
CHOICE = catalogue.fixed(4)
PAIRS = CHOICE.ring
# Each with the library to call it by.
CALLS = {
    n: (jaxcomm, case)
    for n, case in [*catalogue.KINDS.items(), ("pcast", catalogue.PCAST)]
}
CALLS |= {
    f"{n}_start": (catalogue.SPLIT_PHASE, case)
    for n, case in catalogue.FUNCTIONS.items()
    if case.starts
}


def apply(name, x, **options):
    lib, case = CALLS[name]
    return case(lib, x, "i", CHOICE, **options)


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
            return apply(name, x, **LANE)

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
        .lower(np.ones(8, np.float32), np.ones((16, 8), np.float32))
        .as_text()
    )
    assert {c.lane for c in jaxcomm.communicators()} <= {"other"}
    for op in ('all_reduce"', 'all_gather"', 'reduce_scatter"', 'collective_permute"'):
        assert f'"stablehlo.{op}' not in text


@pytest.mark.parametrize(
    "name", ["psum", "all_gather", "ppermute", "pscan", "psum_scatter"]
)
def test_vmap_over_one_of_two_axes_keeps_the_lane(make_mesh, name):
    case = catalogue.CASES[name]

    def call(x):
        return case(jaxcomm, x, ("i", "v"), CHOICE, **LANE)

    f = jax.shard_map(
        lambda x: jax.vmap(call, axis_name="v")(x),
        mesh=make_mesh(i=2),
        in_specs=jax.P("i"),
        out_specs=jax.P("i"),
        check_vma=False,
    )
    jax.jit(f).lower(np.ones((4, 4, 8), np.float32))
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_stay_with_the_backend_of_the_call(make_mesh, name):
    mesh = make_mesh(i=4)

    def local(w, x):
        def of(w, x):
            w = jaxcomm.pcast(w, "i", to="varying", backend="xla")
            if name == "pcast":
                return (w * x).sum()
            return jnp.sin(apply(name, w * x, backend="xla")).sum()

        return jax.grad(of, (0, 1))(w, x)

    spec = jax.P("i")
    program = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(), spec), out_specs=(jax.P(), spec)
    )
    text = (
        jax.jit(program)
        .lower(np.ones(8, np.float32), np.ones((16, 8), np.float32))
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
