"""Communicators are made once, found, listed, counted and closed."""

import copy
import functools
import pickle

import jax
import numpy as np
import pytest
from models import over

import jaxcomm
from jaxcomm.communicator.lane import DEFAULT_LANE

X = np.arange(8, dtype=np.float32)


def calls_of(members):
    return [member.stats()["calls"] for member in members]


# init


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((), [("a",), ("b",), ("a", "b")]),
        (("b",), [("b",)]),
        ((("b", "a"),), [("b", "a")]),
        (("a", ("a", "b")), [("a",), ("a", "b")]),
    ],
)
def test_init_takes_names_and_tuples_of_names(
    make_mesh, counted, psum_over, axes, expected
):
    """Of no axes it makes one for each and one for all."""
    mesh = make_mesh(a=2, b=4)
    made, again = jaxcomm.init(mesh, *axes), jaxcomm.init(mesh, *axes)
    assert [c.axes for c in made] == expected
    assert all(one is other for one, other in zip(made, again, strict=True))
    for member in made:
        assert member.size == np.prod([mesh.shape[axis] for axis in member.axes])
        psum_over(mesh, member.axes)(X)
    assert counted() == {"created": len(expected), "live": len(expected)}


def test_lowering_makes_what_is_missing_and_running_never_does(
    make_mesh, counted, psum_over
):
    assert [c.axes for c in jaxcomm.init(make_mesh(i=8))] == [("i",)]
    lowered = psum_over(make_mesh(i=4)).lower(X)
    assert counted() == {"created": 2, "live": 2}
    compiled = lowered.compile()
    # One device needs none.
    np.testing.assert_array_equal(psum_over(make_mesh(i=1))(X), X)
    for _ in range(3):
        compiled(X)
    assert counted() == {"created": 2, "live": 2}


def test_each_lane_is_a_communicator_of_its_own_for_every_kind_of_call(
    make_mesh, counted
):
    """N1: ring hops and all else over the same axes need one."""
    mesh = make_mesh(i=4)
    made = jaxcomm.init(mesh, "i", lanes=("keys", "values"))
    assert [c.lane for c in made] == ["keys", "values"]
    assert [c.lane for c in jaxcomm.init(mesh, "i", lanes="keys")] == ["keys"]

    def call(x):
        for hop in range(1, 4):
            x = jaxcomm.ring_shift(x, "i", hop)
        x = jaxcomm.ppermute(x, "i", [(0, 3)])
        both = jaxcomm.psum(x, "i", lane="keys"), jaxcomm.pmax(x, "i", lane="values")
        return *both, jaxcomm.all_gather(x, "i"), jaxcomm.pscan(x, "i")

    jax.block_until_ready(over(mesh, call)(X))
    assert counted() == {"created": 3, "live": 3}
    *_, default = jaxcomm.communicators()
    assert default.lane == DEFAULT_LANE
    assert calls_of([*made, default]) == [
        {"all_reduce": 1}, {"all_reduce": 1},
        {"permute": 4, "all_gather": 1, "scan": 1},
    ]  # fmt: skip


def test_one_function_under_two_orders_of_devices_is_right_under_both(
    make_mesh, counted
):
    """C4, C5: a lowering for one order must not serve the other."""
    straight = make_mesh(a=2, b=4)
    devices = straight.devices.ravel()[[5, 2, 7, 0, 1, 6, 3, 4]].reshape(2, 4)
    crossed = jax.sharding.Mesh(devices, ("a", "b"), axis_types=straight.axis_types)

    @jax.jit
    def program(x):
        return jax.shard_map(
            lambda x: (jaxcomm.psum(x, "a"), jaxcomm.pscan(x, ("b", "a"))),
            in_specs=jax.P(("a", "b")),
            out_specs=jax.P(("a", "b")),
        )(x)

    grid = X.reshape(2, 4)
    expected = np.tile(grid.sum(0), 2), grid.T.cumsum().reshape(4, 2).T.ravel()
    for mesh in (straight, crossed) * 20:
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(("a", "b"))))
        with jax.set_mesh(mesh):
            jax.tree.map(np.testing.assert_array_equal, program(x), expected)
    assert counted() == {"created": 4, "live": 4}
    members = [c for c in jaxcomm.communicators() if c.axes == ("b", "a")]
    assert len({member.groups for member in members}) == 2
    assert calls_of(members) == [{"scan": 20}] * 2


def test_a_program_may_have_several_meshes_of_the_same_devices(make_mesh):
    """JAX takes one mesh for primitives that ask for devices, unless it is given."""
    wide, tall, other = make_mesh(a=2, b=4), make_mesh(a=4, b=2), make_mesh(x=2, y=4)
    shared = jax.jit(lambda lib, x, axis: lib.psum(x, axis) + x, static_argnums=(0, 2))

    def program(lib, x):
        for mesh in (wide, tall, other, wide):
            axes = mesh.axis_names

            def local(x, axes=axes):
                x, _ = jax.lax.scan(
                    lambda x, _: (shared(lib, x, axes[0]), None), x, length=2
                )
                rank = jax.lax.axis_index(axes).astype(x.dtype)
                return shared(lib, x, axes[1]) * rank

            x = over(mesh, local, jit=False)(x)
        return x

    def slope(lib, x):
        return jax.grad(lambda x: program(lib, x).sum())(x)

    for derived in (program, slope):
        run = jax.jit(derived, static_argnums=0)
        # Numbers with more digits than float32 has, added in another order.
        np.testing.assert_allclose(run(jaxcomm, X), run(jax.lax, X), 1e-6)
    groups = {each.groups for each in jaxcomm.communicators()}
    assert len(groups) == 4  # Of two and of four devices, side by side and apart.


def test_meshes_that_are_given_have_the_groups_of_their_own_devices(make_mesh):
    """In turn, and in one program: JAX refuses two orders of devices in that."""
    straight = make_mesh(i=4)
    devices = straight.devices[[2, 0, 3, 1]]
    crossed = jax.sharding.Mesh(devices, ("i",), axis_types=straight.axis_types)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def program(lib, meshes, x):
        for mesh in meshes:
            x = over(mesh, lambda x: lib.ppermute(x, "i", [(0, 1), (1, 2)]), jit=False)(
                x
            )
        return x

    for mesh in (straight, crossed) * 2:
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("i")))
        ours, lax = (program(lib, (mesh,), x) for lib in (jaxcomm, jax.lax))
        np.testing.assert_array_equal(ours, lax)
    for lib in (jaxcomm, jax.lax):
        with pytest.raises(ValueError, match="incompatible devices"):
            program(lib, (straight, crossed), X)


# arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        # As psum takes it, for axes together.
        ((["a", ("a", "b")],), {}, TypeError,
         r"init: the list \['a', \('a', 'b'\)\] may mean one communicator for each "
         r"entry, or one over all of them together, as in psum\. Write init\(mesh, "
         r"'a', \('a', 'b'\)\) for one each, or init\(mesh, tuple\(axes\)\) for one"),
        (("nowhere",), {}, ValueError, "axis 'nowhere' is not an axis of the mesh"),
        ((("a", "a"),), {}, ValueError, "name an axis twice"),
        (("a",), {"backend": "gloo"}, ValueError, "backend 'gloo' is unknown"),
        (("a", ()), {}, ValueError, r"joins no axes, got init\(mesh, 'a', \(\)\)"),
        (("a",), {"lanes": ()}, ValueError, "lanes is empty"),
        (("a",), {"lanes": ""}, ValueError, "lane must be a non-empty string"),
        (("a",), {"lanes": 2}, TypeError, "lanes must be names, got 2. Pass one for"),
        (("a",), {"lanes": {"b"}}, TypeError, "lanes must be in order, got the set"),
        # What is false is not the same as None.
        (("a",), {"policy": {}}, TypeError, r"CommPolicy or None, got \{"),
    ],
)  # fmt: skip
def test_bad_arguments_make_nothing(make_mesh, arguments, options, error, message):
    for mesh in (make_mesh(i=4).abstract_mesh, jax.devices()):
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
            jaxcomm.init(mesh)
    with pytest.raises(error, match=message):
        jaxcomm.init(make_mesh(a=2, b=2), *arguments, **options)
    assert len(jaxcomm.communicators()) == 0


def test_a_choice_that_was_refused_is_not_in_force(make_mesh, monkeypatch, psum_over):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh)
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "1")
    with pytest.raises(jaxcomm.CommunicatorError, match="the bound set by"):
        jaxcomm.init(mesh, timeout=50, lanes="other")
    monkeypatch.delenv("JAXCOMM_MAX_COMMUNICATORS")
    jaxcomm.init(mesh, lanes="other")
    assert [member.timeout for member in jaxcomm.communicators()] == [300, 300]


@pytest.mark.parametrize(
    ("axes", "call"),
    [
        ("b", lambda x: jaxcomm.psum(x, "b")),
        (("a", "b"), lambda x: jaxcomm.ppermute(x, ("a", "b"), [(0, 1), (1, 0)])),
        (("b", "a"), lambda x: jaxcomm.ppermute(x, ("b", "a"), [(0, 1), (1, 0)])),
        ("b", lambda x: jaxcomm.psum(x, "b", axis_index_groups=[[1], [0]])),
    ],
    ids=["sum", "permute", "permute in the order of the mesh", "index groups"],
)
def test_what_init_chose_for_axes_holds_for_calls_over_them(make_mesh, axes, call):
    mesh = make_mesh(a=2, b=2)
    jaxcomm.init(mesh, axes, backend="xla", timeout=70)
    assert "@jaxcomm" not in over(mesh, call).lower(X).as_text()
    members = jaxcomm.communicators()
    assert {(each.backend, each.timeout) for each in members} == {("xla", 70)}


def test_a_lane_that_nobody_declared_is_refused(make_mesh, counted, psum_over):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, lanes=("keys", "values"))
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"lane 'vaules' is not declared for this mesh of axes \('i',\): its "
        r"lanes are 'default', 'keys', 'values'\. Use one of them, or declare it on "
        r"every process: jaxcomm\.init\(mesh, lanes=\('vaules',\)\)",
    ):
        psum_over(mesh, lane="vaules").lower(X)
    assert counted() == {"created": 2, "live": 2}
    jaxcomm.init(mesh, lanes="vaules")
    psum_over(mesh, lane="vaules").lower(X)
    psum_over(mesh).lower(X)
    # A mesh that nobody gave to init has all lanes.
    psum_over(make_mesh(i=8), lane="other").lower(X)
    assert [c.lane for c in jaxcomm.communicators()] == [
        "keys", "values", "vaules", DEFAULT_LANE, "other",
    ]  # fmt: skip
    jaxcomm.finalize()
    psum_over(mesh, lane="other").lower(X)
    assert [c.lane for c in jaxcomm.communicators()] == ["other"]


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_a_policy_for_a_backend_that_takes_none_is_refused(make_mesh, backend):
    policy = jaxcomm.CommPolicy(max_ctas=8)
    with pytest.raises(
        ValueError,
        match=f"init: backend '{backend}' takes no policy, got CommPolicy.*choose "
        f"backend='nccl', or None",
    ):
        jaxcomm.init(make_mesh(i=2), backend=backend, policy=policy)
    assert len(jaxcomm.communicators()) == 0
    # A program for GPUs may run on CPU devices.
    (member,) = jaxcomm.init(make_mesh(i=2), policy=policy)
    assert member.policy is None


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_is_not_copied(make_mesh, how):
    (member,) = jaxcomm.init(make_mesh(i=4))
    with pytest.raises(TypeError, match="a communicator cannot be copied or pickled"):
        how(member)


# closing


def test_a_closed_communicator_is_an_error_that_names_init(
    make_mesh, counted, psum_over
):
    """P1: running looks up and never creates."""
    mesh = make_mesh(i=4)
    program = psum_over(mesh)
    program(X)
    (member,) = jaxcomm.communicators()
    member.close()
    member.close()  # harmless
    assert member.closed
    assert counted() == {"created": 1, "destroyed": 1}
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"jaxcomm\.init\(mesh"
    ) as caught:
        jax.block_until_ready(program(X))
    assert "psum(float32[2]) over axes ('i',)" in str(caught.value)
    assert counted() == {"created": 1, "destroyed": 1}
    (again,) = jaxcomm.init(mesh)
    member.close()
    assert (member.closed, again.closed) == (True, False)
    assert member.key == again.key
    np.testing.assert_array_equal(program(X)[:2], X.reshape(4, 2).sum(0))
    assert counted() == {"created": 2, "destroyed": 1, "live": 1}


def test_the_end_of_a_with_block_closes(make_mesh):
    (member,) = jaxcomm.init(make_mesh(i=2))
    with member as inside:
        assert inside is member
        assert not member.closed
    assert member.closed
    assert not any(member.stats().values())
    with pytest.raises(KeyError), jaxcomm.init(make_mesh(i=2))[0]:
        raise KeyError
    assert len(jaxcomm.communicators()) == 0


def test_finalize_closes_all_forgets_choices_and_may_be_called_again(
    make_mesh, counted, psum_over
):
    mesh = make_mesh(a=2, b=2)
    made = jaxcomm.init(mesh, backend="xla")
    jaxcomm.finalize()
    jaxcomm.finalize()
    assert all(member.closed for member in made)
    assert counted() == {"borrowed": 3, "destroyed": 3}
    assert jaxcomm.init(mesh)[0].backend == "host"
    assert "@jaxcomm" in psum_over(mesh, "a").lower(X).as_text()


# how many


def test_the_bound_on_live_communicators_is_an_error_that_names_it(
    monkeypatch, make_mesh, counted, psum_over
):
    """N6."""
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "2")
    mesh = make_mesh(a=2, b=2)
    with pytest.raises(
        jaxcomm.CommunicatorError, match=r"2 live communicators.*JAXCOMM_MAX_COMM"
    ):
        jaxcomm.init(mesh)
    with pytest.raises(jaxcomm.CommunicatorError, match=r"axes \('a', 'b'\)"):
        psum_over(mesh, ("a", "b"))(X)
    jaxcomm.communicators()[0].close()
    psum_over(mesh, ("a", "b"))(X)
    assert counted() == {"created": 3, "destroyed": 1, "live": 2}
