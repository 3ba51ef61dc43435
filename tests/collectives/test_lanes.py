"""Derivatives and batches go through the lane and backend of the call."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

LANE = {"lane": "other"}
CHOICE = catalogue.fixed(4)
lowered = pytest.mark.host_only(reason="lanes and backends are of the trace")


def calls(**options):
    """Return every function, and its halves, as functions of an array."""

    def of(lib, case):
        return lambda x: case(lib, x, "i", CHOICE, **options)

    whole = [of(jaxcomm, case) for case in catalogue.KINDS.values()]
    started = [case for case in catalogue.FUNCTIONS.values() if case.starts]
    return whole + [of(catalogue.SPLIT_PHASE, case) for case in started]


def lowered_text(mesh, losses, check_vma=True):
    """Lower first and second derivatives by a shared operand and one of each rank."""

    def local(w, x):
        def derivatives(loss):
            second = jax.grad(lambda x: (jax.grad(loss, 1)(w, x) ** 2).sum())(x)
            return jax.grad(loss, (0, 1))(w, x), second

        return [derivatives(loss) for loss in losses]

    spec = jax.P("i")
    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), spec),
        out_specs=[((jax.P() if check_vma else spec, spec), spec)] * len(losses),
        check_vma=check_vma,
    )
    given = np.ones(8, np.float32), np.ones((16, 8), np.float32)
    return jax.jit(program).lower(*given).as_text()


def losses_of(**options):
    def loss(call):
        # Of parameters that all ranks share, too, marked in that lane.
        return lambda w, x: jnp.sin(
            call(jaxcomm.pcast(w, "i", to="varying", **options) * x)
        ).sum()

    return [loss(call) for call in calls(**options)]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=lowered)])
def test_derivatives_go_through_the_lane_of_the_call(mesh, check_vma):
    text = lowered_text(mesh, losses_of(**LANE), check_vma)
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}
    for op in ('all_reduce"', 'all_gather"', 'reduce_scatter"', 'collective_permute"'):
        assert f'"stablehlo.{op}' not in text


@lowered
def test_derivatives_stay_with_the_backend_of_the_call(mesh):
    assert "@jaxcomm" not in lowered_text(mesh, losses_of(backend="xla"))
    assert all(c.backend == "xla" for c in jaxcomm.communicators())


@lowered
def test_vmap_over_one_of_two_axes_keeps_the_lane(mesh_of):
    names = "psum", "all_gather", "ppermute", "pscan", "psum_scatter"

    def call(x):
        return [
            catalogue.CASES[n](jaxcomm, x, ("i", "v"), CHOICE, **LANE) for n in names
        ]

    f = jax.shard_map(
        jax.vmap(call, axis_name="v"),
        mesh=mesh_of((2,), ("i",)),
        in_specs=jax.P("i"),
        out_specs=jax.P("i"),
        check_vma=False,
    )
    jax.jit(f).lower(np.ones((4, 4, 8), np.float32))
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}


@lowered
def test_the_gradient_of_what_all_ranks_share_goes_through_the_ring_s_lane(mesh):
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
