"""Derivatives and batches go through the lane and backend of the call."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

LANE = {"lane": "other"}
CHOICE = catalogue.fixed(4)
lowered = pytest.mark.host_only(reason="lanes and backends are of the trace")
SPECS = jax.P(), jax.P("i")


def lowered_text(mesh, check_vma=True, **options):
    """Lower first and second derivatives of all by a shared operand and one of each."""
    started = [case for case in catalogue.FUNCTIONS.values() if case.starts]
    calls = [(jaxcomm, case) for case in catalogue.KINDS.values()]
    calls += [(catalogue.SPLIT_PHASE, case) for case in started]

    def derivatives(w, x, lib, case):
        def loss(w, x):
            # Of parameters that all ranks share, too, marked in that lane.
            w = jaxcomm.pcast(w, "i", to="varying", **options)
            return jnp.sin(case(lib, w[None] * x, "i", CHOICE, **options)).sum()

        second = jax.grad(lambda x: (jax.grad(loss, 1)(w, x) ** 2).sum())(x)
        return jax.grad(loss, (0, 1))(w, x), second

    def local(w, x):
        return [derivatives(w, x, *each) for each in calls]

    split = jax.P("i")
    out = [((jax.P() if check_vma else split, split), split)] * len(calls)
    program = over(mesh, local, SPECS, out, check_vma)
    return program.lower(np.ones(8, np.float32), np.ones((16, 8), np.float32)).as_text()


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=lowered)])
def test_derivatives_go_through_the_lane_of_the_call(mesh, check_vma):
    text = lowered_text(mesh, check_vma, **LANE)
    assert {c.lane for c in jaxcomm.communicators()} == {"other"}
    for op in ('all_reduce"', 'all_gather"', 'reduce_scatter"', 'collective_permute"'):
        assert f'"stablehlo.{op}' not in text


@lowered
def test_derivatives_stay_with_the_backend_of_the_call(mesh):
    assert "@jaxcomm" not in lowered_text(mesh, backend="xla")


def _over_one_of_two_axes(w, x):
    names = "psum", "all_gather", "ppermute", "pscan", "psum_scatter"

    def call(x):
        calls = (catalogue.CASES[name] for name in names)
        return [case(jaxcomm, x, ("i", "v"), CHOICE, **LANE).sum() for case in calls]

    return jax.vmap(call, axis_name="v")(jnp.stack([x] * 2))


def _typed_as_varying(w, x):
    """The transpose of being typed as varying is a sum."""
    return jax.grad(lambda w: (jaxcomm.pscan(w, "i", **LANE) * x[0]).sum())(w)


@lowered
@pytest.mark.parametrize(
    ("call", "out", "backend"),
    [
        (_over_one_of_two_axes, jax.P("i"), "host"),
        (_typed_as_varying, jax.P(), "host"),
        (_typed_as_varying, jax.P(), "xla"),
    ],
)
def test_batches_and_sums_of_gradients_go_where_the_call_goes(mesh, call, out, backend):
    program = over(mesh, call, SPECS, out, check_vma=out == jax.P())
    with jaxcomm.using(backend=backend):
        program.lower(np.ones(8, np.float32), np.ones((32, 8), np.float32))
    found = {(c.lane, c.backend) for c in jaxcomm.communicators()}
    assert found == {("other", backend)}
