"""Communicators are made once, found, listed and counted."""

import copy
import pickle
import re

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator.lane import DEFAULT_LANE


def permuted(mesh, order):
    devices = mesh.devices.ravel()[list(order)].reshape(mesh.devices.shape)
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


X = np.arange(8, dtype=np.float32)


# init


def test_init_of_no_axes_makes_one_for_each_and_one_for_all(make_mesh, counted):
    made = jaxcomm.init(make_mesh(a=2, b=4))
    assert [c.axes for c in made] == [("a",), ("b",), ("a", "b")]
    assert [(c.size, len(c.groups)) for c in made] == [(2, 4), (4, 2), (8, 1)]
    assert counted() == {"created": 3, "live": 3}
    assert [c.axes for c in jaxcomm.init(make_mesh(i=8))] == [("i",)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ("b", [("b",)]),
        (("b", "a"), [("b", "a")]),
        (["a", ("a", "b")], [("a",), ("a", "b")]),
        ([], []),
    ],
)
def test_init_takes_a_name_a_tuple_or_a_list_of_them(make_mesh, axes, expected):
    made = jaxcomm.init(make_mesh(a=2, b=2), axes)
    assert [c.axes for c in made] == expected
    assert len(jaxcomm.communicators()) == len(expected)


def test_init_twice_keeps_what_is_there(make_mesh, counted):
    first = jaxcomm.init(make_mesh(i=4))
    again = jaxcomm.init(make_mesh(i=4))
    assert first[0] is again[0]
    assert counted() == {"created": 1, "live": 1}


def test_programs_find_what_init_made(make_mesh, counted, psum_over):
    mesh = make_mesh(a=2, b=4)
    jaxcomm.init(mesh)
    for axes in ("a", "b", ("a", "b")):
        psum_over(mesh, axes)(X)
    assert counted() == {"created": 3, "live": 3}


def test_lowering_makes_what_is_missing_and_running_never_does(
    make_mesh, counted, psum_over
):
    mesh = make_mesh(i=4)
    lowered = psum_over(mesh).lower(X)
    assert counted() == {"created": 1, "live": 1}
    compiled = lowered.compile()
    for _ in range(3):
        compiled(X)
    assert counted() == {"created": 1, "live": 1}


def test_each_lane_is_a_communicator_of_its_own(make_mesh, counted, psum_over):
    mesh = make_mesh(i=4)
    made = jaxcomm.init(mesh, "i", lanes=("keys", "values"))
    assert [c.lane for c in made] == ["keys", "values"]
    assert [c.lane for c in jaxcomm.init(mesh, "i", lanes="keys")] == ["keys"]

    def program(x):
        return jaxcomm.psum(x, "i", lane="keys"), jaxcomm.pmax(x, "i", lane="values")

    spec = jax.P("i")
    program = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
    jax.block_until_ready(program(X))
    assert [c.stats()["calls"] for c in made] == [{"all_reduce": 1}, {"all_reduce": 1}]
    assert counted() == {"created": 2, "live": 2}
    psum_over(mesh)(X)
    assert jaxcomm.communicators()[2].lane == DEFAULT_LANE


def test_every_kind_of_call_shares_one_communicator(make_mesh, counted):
    """N1: ring hops and all else over the same axes need one."""
    mesh = make_mesh(i=4)

    def program(x):
        for hop in range(1, 4):
            x = jaxcomm.ring_shift(x, "i", hop)
        x = jaxcomm.ppermute(x, "i", [(0, 3)])
        return jaxcomm.psum(x, "i"), jaxcomm.all_gather(x, "i"), jaxcomm.pscan(x, "i")

    spec = jax.P("i")
    program = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
    jax.block_until_ready(program(X))
    assert counted() == {"created": 1, "live": 1}
    assert jaxcomm.communicators()[0].stats()["calls"] == {
        "permute": 4, "all_reduce": 1, "all_gather": 1, "scan": 1,
    }  # fmt: skip


def test_twenty_lengths_share_one_communicator_and_its_memory(
    make_mesh, counted, psum_over
):
    """N2: changing shapes create nothing."""
    program = psum_over(make_mesh(i=4))
    held = []
    for length in range(4, 84, 4):
        found = program(np.ones(length, np.float32))
        np.testing.assert_array_equal(found, np.full(length, 4.0))
        held.append(jaxcomm.memory_report()[0].host_bytes)
    assert counted() == {"created": 1, "live": 1}
    # Less than so many lengths would take; one operation more at a time may take some.
    assert held[-1] - held[1] < 4096, held


# meshes


def test_one_function_under_two_orders_of_devices_is_right_under_both(
    make_mesh, counted
):
    """C4: a lowering for one order must not serve the other."""
    straight = make_mesh(a=2, b=4)
    crossed = permuted(straight, (5, 2, 7, 0, 1, 6, 3, 4))

    @jax.jit
    def program(x):
        return jax.shard_map(
            lambda x: (
                jaxcomm.psum(x, "a"),
                jaxcomm.all_gather(x, "b", tiled=True),
                jaxcomm.pscan(x, ("b", "a")),
            ),
            in_specs=jax.P(("a", "b")),
            out_specs=jax.P(("a", "b")),
        )(x)

    def expected():
        grid = X.reshape(2, 4)
        ranked = grid.T.cumsum().reshape(4, 2).T
        return (
            np.tile(grid.sum(0), 2),
            np.repeat(grid, 4, 0).ravel(),
            ranked.ravel(),
        )

    for mesh in (straight, crossed, straight, crossed):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(("a", "b"))))
        with jax.set_mesh(mesh):
            found = program(x)
        jax.tree.map(np.testing.assert_array_equal, found, expected())
    assert counted() == {"created": 6, "live": 6}
    sequences = {c.groups for c in jaxcomm.communicators() if c.axes == ("b", "a")}
    assert len(sequences) == 2


def test_alternating_two_meshes_keeps_two_communicators(make_mesh, counted):
    """C5."""
    straight = make_mesh(i=8)
    meshes = (straight, permuted(straight, (1, 0, 3, 2, 7, 6, 5, 4)))

    @jax.jit
    def program(x):
        return jax.shard_map(
            lambda x: jaxcomm.ring_shift(x, "i"),
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
        )(x)

    placed = [jax.device_put(X, jax.NamedSharding(mesh, jax.P("i"))) for mesh in meshes]
    for turn in range(200):
        with jax.set_mesh(meshes[turn % 2]):
            found = program(placed[turn % 2])
        np.testing.assert_array_equal(found, np.roll(X, 1))
    assert counted() == {"created": 2, "live": 2}
    assert [c.stats()["calls"] for c in jaxcomm.communicators()] == [
        {"permute": 100}
    ] * 2


def test_a_submesh_is_another_mesh(make_mesh, psum_over):
    """C13: one process drives several devices, in several meshes."""
    for size in (2, 3, 5, 8):
        x = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(psum_over(make_mesh(i=size))(x), [x.sum()] * size)
    assert [c.size for c in jaxcomm.communicators()] == [2, 3, 5, 8]


def test_one_device_needs_no_communicator(make_mesh, counted, psum_over):
    program = psum_over(make_mesh(i=1))
    np.testing.assert_array_equal(program(X), X)
    assert counted() == {}


@pytest.mark.parametrize("what", ["abstract mesh", "a list of devices"])
def test_init_wants_a_mesh_of_devices(make_mesh, what):
    mesh = make_mesh(i=4).abstract_mesh if what == "abstract mesh" else jax.devices()
    with pytest.raises(TypeError, match=r"init: mesh must be a jax\.sharding\.Mesh"):
        jaxcomm.init(mesh)


def test_a_program_lowered_for_an_abstract_mesh_is_refused(make_mesh):
    abstract = make_mesh(i=4).abstract_mesh

    program = jax.shard_map(
        lambda x: jaxcomm.psum(x, "i"),
        mesh=abstract,
        in_specs=jax.P("i"),
        out_specs=jax.P("i"),
    )
    sharding = jax.NamedSharding(abstract, jax.P("i"))
    struct = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    with pytest.raises(ValueError, match=r"(?i)abstract ?mesh"):
        jax.jit(program).trace(struct).lower(lowering_platforms=("cpu",))
    assert len(jaxcomm.communicators()) == 0


# arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("nowhere",), {}, ValueError, "axis 'nowhere' is not an axis of the mesh"),
        ((("a", "a"),), {}, ValueError, "name an axis twice"),
        (("a",), {"backend": "gloo"}, ValueError, "backend 'gloo' is unknown"),
        (("a",), {"lanes": ""}, ValueError, "lane must be a non-empty string"),
        (("a",), {"lanes": (3,)}, ValueError, "lane must be a non-empty string, got 3"),
    ],
)
def test_bad_arguments_make_nothing(make_mesh, arguments, options, error, message):
    with pytest.raises(error, match=message):
        jaxcomm.init(make_mesh(a=2, b=2), *arguments, **options)
    assert len(jaxcomm.communicators()) == 0


def test_the_backend_that_init_chose_is_used(make_mesh, counted, psum_over):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, backend="xla")
    text = psum_over(mesh).lower(X).as_text()
    assert "stablehlo.all_reduce" in text
    assert "jaxcomm" not in re.sub(r"loc\(.*", "", text)
    assert counted() == {"borrowed": 1, "live": 1}
    assert jaxcomm.init(mesh, backend="host")[0].backend == "host"
    assert "jaxcomm.all_reduce" in psum_over(mesh).lower(X).as_text()


def test_a_choice_that_was_refused_is_not_in_force(make_mesh, monkeypatch, psum_over):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh)
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "1")
    with pytest.raises(jaxcomm.CommunicatorError, match="the bound set by"):
        jaxcomm.init(mesh, timeout=5, lanes="other")
    monkeypatch.delenv("JAXCOMM_MAX_COMMUNICATORS")
    jaxcomm.init(mesh, lanes="other")
    psum_over(mesh, lane="other")(X)
    assert [member.timeout for member in jaxcomm.communicators()] == [300, 300]


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_a_choice_holds_for_permutes_which_order_axes_as_the_mesh_does(make_mesh, axes):
    mesh = make_mesh(a=2, b=2)
    jaxcomm.init(mesh, axes, timeout=7)

    def exchange(x):
        return jaxcomm.ppermute(x, axes, [(0, 1), (1, 0)])

    split = jax.P(axes)
    jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=split, out_specs=split))(X)
    assert {member.timeout for member in jaxcomm.communicators()} == {7}


def test_a_lane_that_nobody_declared_is_refused(make_mesh, counted, psum_over):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, lanes=("keys", "values"))
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"lane 'vaules' is not declared for this mesh of axes \('i',\): its "
        r"lanes are 'default', 'keys', 'values'\. Use one of them, or declare it on "
        r"every process: jaxcomm\.init\(mesh, lanes=\('vaules',\)\)",
    ):
        psum_over(mesh, lane="vaules")(X)
    assert counted() == {"created": 2, "live": 2}
    jaxcomm.init(mesh, lanes="vaules")
    psum_over(mesh, lane="vaules")(X)
    psum_over(mesh)(X)
    assert [c.lane for c in jaxcomm.communicators()] == [
        "keys", "values", "vaules", DEFAULT_LANE,
    ]  # fmt: skip


def test_lanes_are_free_on_a_mesh_that_nobody_gave_to_init(make_mesh, psum_over):
    jaxcomm.init(make_mesh(i=4), lanes="keys")
    psum_over(make_mesh(i=8), lane="other")(X)
    assert [c.lane for c in jaxcomm.communicators()] == ["keys", "other"]
    jaxcomm.finalize()
    psum_over(make_mesh(i=4), lane="other")(X)
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
    member.close()
    assert len(jaxcomm.communicators()) == 0


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


def test_a_hundred_communicators_cost_headers_alone(make_mesh, psum_over):
    """N4: nothing is staged, so bytes grow by a small header each, traffic or not."""
    mesh = make_mesh(i=4)
    one = jaxcomm.init(mesh, lanes="first")
    psum_over(mesh, lane="first")(np.ones(1 << 20, np.float32))
    (row,) = jaxcomm.memory_report()
    assert row.communicator is one[0]
    assert 0 < row.host_bytes < 4096
    jaxcomm.init(mesh, lanes=[f"lane {n}" for n in range(99)])
    rows = jaxcomm.memory_report()
    assert len(rows) == 100
    assert sum(row.host_bytes for row in rows) < 100 * 4096
    others = {(r.device_bytes, r.shared_bytes, r.pinned_bytes, r.shared) for r in rows}
    assert others == {(0, 0, 0, False)}


def test_what_init_chose_for_axes_holds_for_index_groups_within_them(make_mesh):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, "i", backend="xla", timeout=7)

    def call(x):
        return jaxcomm.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])

    program = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    assert "@jaxcomm" not in program.lower(np.ones(4, np.float32)).as_text()
    assert {(c.backend, c.timeout) for c in jaxcomm.communicators()} == {("xla", 7.0)}
