"""Where ``shard_map`` leaves axes to XLA, our calls move what jax.lax's move."""

import functools
import re
import warnings

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = [
    pytest.mark.host_only(reason="XLA splits operands, whatever carries them"),
    pytest.mark.filterwarnings("ignore:.*XLA's own collective is used here"),
]

CHOICE = catalogue.fixed(2)
TWINS = {name: case for name, case in catalogue.CASES.items() if case.twin}
_MOVES = (
    "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|custom-call"
)
# A result's shape, the operation, and between which devices.
_MOVE = re.compile(rf"= (\S+) ({_MOVES})(?:-start)?\(.*(?:groups|pairs)=([^ ]+)")


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((2, 4), ("data", "model"))


@pytest.fixture
def x(mesh, values):
    """An array of which each device of "model" holds a quarter."""
    split = jax.NamedSharding(mesh, jax.P("data", None, None, "model"))
    return jax.device_put(values("float32", (2, 2, 8, 12)), split)


def partly(mesh, local, manual=("data",), **options):
    """Return a jitted program of which "data" is manual and "model" is XLA's."""
    return jax.jit(
        jax.shard_map(
            lambda x: jax.tree.map(lambda x: x[None], local(x[0])),
            mesh=mesh,
            axis_names=set(manual),
            in_specs=jax.P("data"),
            out_specs=jax.P("data"),
            **options,
        )
    )


def moves(compiled):
    return sorted(_MOVE.findall(compiled.as_text()))


def gradient(lib, cases):
    """Return a function to the gradient of a sum over results of several cases."""

    def loss(x):
        outs = [case(lib, x, "data", CHOICE) for case in cases]
        return sum(jnp.sin(out).sum() for out in outs)

    return jax.grad(loss)


@pytest.mark.parametrize("check_vma", [True, False])
def test_every_twin_moves_what_that_of_jax_lax_moves(mesh, x, check_vma):
    """A custom call would be given whole arrays, gathered over the axes of XLA."""

    def results(lib):
        return lambda x: {n: case(lib, x, "data", CHOICE) for n, case in TWINS.items()}

    differentiable = [case for case in TWINS.values() if case.lax_grad]
    for of in results, functools.partial(gradient, cases=differentiable):
        ours, theirs = (
            partly(mesh, of(lib), check_vma=check_vma).lower(x).compile()
            for lib in (jaxcomm, jax.lax)
        )
        assert moves(ours) == moves(theirs)
        assert "custom-call" not in str(moves(ours))
        found, expected = ours(x), theirs(x)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_every_collective_is_right_whole_and_split_phase(mesh, x, by_group, near):
    def program(x):
        found = {}
        for name, case in catalogue.CASES.items():
            found[name] = case(jaxcomm, x, "data", CHOICE)
            if case.starts:
                found[f"{name} start"] = case(catalogue.SPLIT_PHASE, x, "data", CHOICE)
        return found

    for name, found in partly(mesh, program, check_vma=False)(x).items():
        model = catalogue.CASES[name.split()[0]].model(CHOICE)
        # XLA multiplies by one over 2, and adds in an order of its own.
        near(found, model(np.asarray(x)), 1e-6, name, 1e-6)


@pytest.mark.parametrize("whole", [False, True], ids=["some axes", "all axes"])
def test_it_says_once_for_each_communicator_that_xla_communicates(
    mesh, x, whole, recwarn
):
    def program(x):
        x = jaxcomm.psum(x, "data") + jaxcomm.psum(x, "data", lane="other")
        handle = jaxcomm.ring_shift_start(x, "data")
        return handle.done() + jaxcomm.pmax(x, "data", backend="xla")

    warnings.simplefilter("always")
    for _ in range(2):
        partly(mesh, program, mesh.axis_names if whole else ["data"]).lower(x)
    if whole:
        assert not recwarn
        return
    said = [str(each.message) for each in recwarn]
    assert len(said) == 2
    about = r"psum over \('data',\): XLA's own collective is used here, .*\('model',\)"
    assert re.match(about, said[0])
    assert {each.backend for each in jaxcomm.communicators()} == {"xla"}


@pytest.mark.parametrize("how", ["call", "scope", "init", "variable"])
def test_another_backend_that_was_asked_for_is_refused(mesh, x, how, monkeypatch):
    name = "psum" if how == "call" else "psum_start"
    message = (
        rf"{name} over \('data',\): backend 'host' was asked for, and shard_map leaves "
        r"axes \('model',\) to XLA, .* or use backend='xla'"
    )
    chosen = {"backend": "host"} if how == "call" else {}

    def program(x):
        if how == "call":
            return jaxcomm.psum(x, "data", **chosen)
        return jaxcomm.psum_start(x, "data").done()

    if how == "init":
        jaxcomm.init(mesh, "data", backend="host")
    if how == "variable":
        monkeypatch.setattr("jaxcomm.config.BACKEND", "host")
    scope = jaxcomm.using(backend="host" if how == "scope" else None)
    with scope, pytest.raises(jaxcomm.CommunicatorError, match=message):
        partly(mesh, program).lower(x)
