"""What a plan reads in a program, and what it says of it."""

import dataclasses
import json
import os
import sys

import forked
import jax
import jax.extend
import jax.numpy as jnp
import pytest
import waiting

import jaxcomm
from jaxcomm import compat
from jaxcomm.planning import communicators

X = jax.ShapeDtypeStruct((8, 16), "float32")
MESH = {"data": 2, "context": 4}
SPEC = jax.P("data", "context")


def calls_of(function, *args, mesh=MESH, **options):
    made = jaxcomm.plan(mesh, function, *(args or (X,)), **options)
    return {
        (row.call.name, row.call.axes, row.call.operands): row.times
        for row in made.calls
    }


def test_loops_and_branches_are_counted():
    def step(x):
        def body(carry, _):
            return jaxcomm.psum(carry, "context") * 0.5, None

        x, _ = jax.lax.scan(body, x, length=5)
        x, _ = jax.lax.scan(
            lambda c, _: (jax.lax.scan(body, c, length=3)[0], None), x, length=2
        )
        x = jax.lax.fori_loop(0, 4, lambda _, c: jaxcomm.ring_shift(c, "data"), x)
        return jax.lax.cond(
            x.sum() > 0,
            lambda x: jaxcomm.pmax(jaxcomm.pmax(x, "data"), "data"),
            lambda x: jaxcomm.pmax(x, "data"),
            x,
        )

    operands = "float32[8,16]"
    assert calls_of(step) == {
        ("psum", ("context",), operands): 5 + 6,
        ("ring_shift", ("data",), operands): 4,
        ("pmax", ("data",), operands): 2,
    }


def test_a_while_counts_once_and_says_so():
    def step(x):
        return jax.lax.while_loop(
            lambda x: x.sum() < 3, lambda x: jaxcomm.psum(x, "data"), x
        )

    assert list(calls_of(step).values()) == [1]
    assert "note: a while loop" in str(jaxcomm.plan(MESH, step, X))


def test_a_while_that_counts_to_a_known_number_counts_its_turns():
    def turns(first, last):
        def program(x):
            # Of an operand nothing is known.
            bounds = [x.max().astype(int) if n is None else n for n in (first, last)]
            bounds = map(jax.lax.optimization_barrier, map(jnp.int32, bounds))
            body = lambda _, x: jaxcomm.psum(x, "data")  # noqa: E731
            return jax.lax.fori_loop(*bounds, body, x)

        return sum(calls_of(program).values())

    assert [turns(n, 3) for n in (0, 2, 3, 5, None)] == [3, 1, 0, 0, 1]
    assert turns(0, None) == 1

    def by(step, limit_step):
        return lambda x: jax.lax.while_loop(
            lambda s: s[0] < s[1],
            lambda s: (s[0] + step, s[1] + limit_step, jaxcomm.psum(s[2], "data")),
            (0, 4, x),
        )

    for steps, counted in (((1, 0), [4]), ((2, 0), [1]), ((2, 1), [1])):
        assert list(calls_of(by(*steps)).values()) == counted


def test_gradients_checkpoints_and_nested_jits_are_read():
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jax.jit(lambda x: jaxcomm.psum(x, "context"))(x))

    # Forward, again for the backward pass, and the transpose. Nobody needs the first
    # without the value.
    for derive, count in ((jax.value_and_grad, 3), (jax.grad, 2)):
        assert sum(calls_of(derive(lambda x: layer(x).sum())).values()) == count


def test_a_program_over_global_arrays_has_local_operands(make_mesh):
    types = (jax.sharding.AxisType.Auto,) * 2
    abstract = jax.sharding.AbstractMesh((2, 4), ("data", "context"), axis_types=types)
    mesh = make_mesh(data=2, context=4)
    for of, planned in ({}, MESH), ({}, abstract), ({"mesh": mesh}, mesh):
        program = jax.shard_map(
            lambda x: jaxcomm.psum(x, "data"), in_specs=SPEC, out_specs=SPEC, **of
        )
        assert list(calls_of(program, mesh=planned)) == [
            ("psum", ("data",), "float32[4,4]")
        ]
    with pytest.raises(ValueError, match="Give plan the mesh of the function"):
        jaxcomm.plan({"data": 4, "context": 2}, program, X)


def test_the_planned_mesh_holds_and_not_the_one_that_is_set(make_mesh):
    def shrink(x):
        return jaxcomm.psum_scatter(x, "data", tiled=True)

    x, mesh = jax.ShapeDtypeStruct((32, 16), "float32"), {"data": 4, "context": 4}
    for program in (jax.shard_map(shrink, in_specs=SPEC, out_specs=SPEC), shrink):
        planned = calls_of(program, x, mesh=mesh)
        with jax.set_mesh(make_mesh(data=2, context=4)):
            assert calls_of(program, x, mesh=mesh) == planned


def test_communicators_and_calls_of_xla_are_not_ours():
    made = jaxcomm.plan(
        MESH, lambda x: jax.lax.psum(jax.lax.all_gather(x, "data"), "context"), X
    )
    found = [(row.call.name, row.call.backend) for row in made.calls]
    assert found == [("lax.all_gather", "xla"), ("lax.psum", "xla")]
    assert made.communicators == ()
    # Nothing is sent in groups of one.
    alone = [[0], [1]]
    for psum in jaxcomm.psum, jax.lax.psum:
        assert not calls_of(lambda x, f=psum: f(x, "data", axis_index_groups=alone))


def test_a_broadcast_of_xla_counts_and_collectives_that_are_not_known_are_noted():
    def exchange(name, effects):
        primitive = jax.extend.core.Primitive(name)
        primitive.def_effectful_abstract_eval(lambda x, **_: (x, effects))
        return primitive

    def step(x):
        # Of a name alone, jax takes the letters for axes.
        x = jax.lax.pbroadcast(x, ("data",), 0)
        x += jax.lax.axis_index("context").astype(x.dtype)
        x = exchange("theirs", set()).bind(x, axis_name=("data", "context"))
        effects = compat.named_axis_effects(["context"])
        return exchange("other", effects).bind(jax.lax.pcast(x, "data", to="varying"))

    made = jaxcomm.plan(MESH, step, X)
    (row,) = made.calls
    assert (row.call.collective, row.call.bytes) == ("broadcast", 8 * 16 * 4)
    assert row.sent_bytes == row.call.bytes
    assert made.notes == (
        "other over axes ('context',) is a collective that is not known here, and "
        "counts 0",
        "theirs over axes ('context', 'data') is a collective that is not known here, "
        "and counts 0",
    )


def test_calls_beside_axes_of_xla_are_xla_s():
    def step(x):
        inner = jax.shard_map(
            lambda x: jaxcomm.psum(x, "context"),
            in_specs=jax.P(None, "context"), out_specs=jax.P(), axis_names={"context"},
        )  # fmt: skip
        return jaxcomm.psum(x, "data") + inner(x).sum()

    split = jax.P("data")
    program = jax.shard_map(step, in_specs=split, out_specs=split, axis_names={"data"})
    made = jaxcomm.plan(MESH, program, X, machine="cpu")
    found = [(row.call.axes, row.call.backend) for row in made.calls]
    assert found == [(("data",), "xla"), (("context",), "host")]
    assert made.notes == (
        "XLA's collectives serve a shard_map that leaves axes ('context',) to XLA; "
        "operands count whole, because how XLA splits them is not known before",
    )


def test_rules_get_the_largest_group():
    """Of two bfloat16 numbers NCCL's sum is exact, of three it is not."""
    x, groups = jax.ShapeDtypeStruct((8,), "bfloat16"), [[0, 1], [2, 3, 4]]
    made = jaxcomm.plan(
        {"data": 5}, lambda x: jaxcomm.psum(x, "data", axis_index_groups=groups), x
    )
    assert [row.call.operands for row in made.calls] == ["float32[8]"]


def test_communicators_are_those_that_a_run_makes(make_mesh):
    def step(x):
        x = jaxcomm.psum(x, "data") + jaxcomm.ring_shift(x, "context", lane="ring")
        return jaxcomm.all_gather(x, ("data", "context")).sum(0) + jaxcomm.psum(
            x, "context", axis_index_groups=[[0, 1], [2, 3]]
        )

    mesh = make_mesh(data=2, context=4)
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    )
    made = jaxcomm.plan(mesh, program, X)
    assert made.machine.platform == "cpu"
    assert made.processes == 1
    jax.block_until_ready(program(jnp.ones(X.shape)))
    live = jaxcomm.communicators()
    assert [
        (each.axes, each.index_groups, each.lane, each.backend, each.size)
        for each in made.communicators
    ] == [(of.axes, of.index_groups, of.lane, of.backend, of.size) for of in live]
    counts = [sum(of.count for of in each.groups) for each in made.communicators]
    assert counts == [len(of.groups) for of in live]
    calls = {}
    for row in made.calls:
        groups = row.call.axes, row.call.index_groups, row.call.lane
        calls.setdefault(groups, {})[row.call.collective] = row.times
    assert calls == {
        (of.axes, of.index_groups, of.lane): of.stats()["calls"] for of in live
    }
    # Handed in by all eight ranks of this process.
    planned = sum(row.times * row.call.bytes for row in made.calls)
    assert sum(of.stats()["bytes"] for of in live) == 8 * planned


def test_a_collective_that_sends_to_all_reaches_all_peers():
    policy = jaxcomm.CommPolicy(share=False, one_shot=False)
    # docs/performance.md: 870 MiB with two neighbors, and 0.75 GiB for two peers more.
    # Peers in another domain share a buffer for the network.
    for size, mebibytes in ((8, 870 + 3 * 768), (16, 870 + 3 * 768 + 512)):
        made = jaxcomm.plan(
            {"context": size},
            lambda x: jaxcomm.psum(jaxcomm.all_to_all(x, "context", 0, 0), "context"),
            jax.ShapeDtypeStruct((size,), "float32"), machine="h200", policy=policy,
        )  # fmt: skip
        assert made.communicators[0].peers == size - 1
        assert made.device_bytes == mebibytes * 2**20


@pytest.mark.parametrize(
    ("program", "options", "error", "text"),
    [
        (3, {}, TypeError, "program must be a function"),
        (lambda x: jaxcomm.psum(x, "z"), {}, NameError, "unbound axis name: z"),
        (lambda x: [].index(x), {}, ValueError, "not in list"),
        (None, {"machine": "abacus"}, ValueError, "machine 'abacus' is unknown"),
        (None, {"machine": 3}, TypeError, "machine must be a name"),
        (None, {"policy": "shared"}, TypeError, "policy must be"),
        (None, {"devices_per_process": 0}, ValueError, "process must be at least 1"),
        (None, {"lanes": ("",)}, ValueError, "lane must be a non-empty string"),
        (None, {"backend": "gloo"}, ValueError, "backend 'gloo' is unknown; choose"),
    ],
)
def test_what_cannot_be_planned_is_refused(program, options, error, text):
    with pytest.raises(error, match=text):
        jaxcomm.plan(MESH, program, *((X,) if callable(program) else ()), **options)
    with pytest.raises(TypeError, match="but no function"):
        jaxcomm.plan(MESH, None, X)


def test_no_device_is_started():
    """JAX would raise: it knows no platform of this name."""
    code = """if True:
        import jax, jaxcomm
        x = jax.ShapeDtypeStruct((8, 16), "bfloat16")
        made = jaxcomm.plan(
            {"data": 2, "context": 4}, lambda x: jaxcomm.psum(x, "data"), x
        )
        assert str(made) and made.to_json() and made._repr_html_()
        layout = jaxcomm.Layout("contiguous", 4, 16)
        assert jaxcomm.attention.compare_strategies(layout, heads=8, head_size=64)
        ring = lambda x: jaxcomm.ring_attention(x, x, x, "context", layout)
        local = jax.ShapeDtypeStruct((1, 4, 2, 8), "bfloat16")
        assert jaxcomm.plan({"context": 4}, ring, local).calls
        try:
            jax.devices()
        except RuntimeError:
            print("planned")
    """
    done = forked.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "abacus"},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "planned\n"), done.stderr


def test_a_plan_is_html_and_json():
    """The text of one is in docs/planning.md."""
    made = jaxcomm.plan(MESH, lambda x: jaxcomm.psum(x, "data"), X, machine="h100")
    assert made._repr_html_().count("<table>") == 2
    document = json.loads(json.dumps(made.to_json()))
    assert document["calls"][0]["call"]["name"] == "psum"
    assert document["communicators"][0]["device_bytes"] == document["device_bytes"]
    assert document["step_bytes"] == 512
    alone = jaxcomm.plan(MESH)
    assert alone.step_bytes == 0
    assert alone._repr_html_().count("<table>") == 1


def memory_of(size, lanes, machine, **policy):
    names = tuple(f"lane {i}" for i in range(lanes))
    policy = jaxcomm.CommPolicy(lanes=13, **policy)
    made = jaxcomm.plan({"a": size}, lanes=names, machine=machine, policy=policy)
    assert [each.peers for each in made.communicators] == [min(size - 1, 2)] * lanes
    return made.device_bytes


def test_memory_is_that_of_published_reports_and_of_our_own_measurements():
    # XLA PR 9845: 13 communicators 21.0 GB, 8 of them 14.5 GB; NCCL 864: 1.6 GB.
    for lanes, gigabytes in ((13, 21.0), (8, 14.5), (1, 1.6)):
        found = memory_of(64, lanes, "h100", share=False)
        assert 0.7 <= found / gigabytes / 1e9 <= 1.3
    hosts_of_one = dataclasses.replace(jaxcomm.Machine.named("h200"), host=1)
    # docs/performance.md: 870 MiB each; eight that share 218 MiB each, one 806.
    for lanes, mebibytes, policy in (
        (1, 870, {"share": False}),
        (1, 870 / 4, {"share": False, "max_ctas": 8}),
        (1, 806, {"share": True}),
        (8, 8 * 218, {"share": True}),
    ):
        found = memory_of(2, lanes, "h200", one_shot=False, **policy)
        assert found / (1 << 20) == pytest.approx(mebibytes, rel=0.01)
        # Ranks of one host have an inbox for our kernels.
        inbox = communicators.inbox_bytes(2)
        assert memory_of(2, lanes, "h200", **policy) - found == lanes * inbox
        assert memory_of(2, lanes, hosts_of_one, **policy) == found


def test_processes_are_those_of_hosts_or_as_many_as_asked():
    assert jaxcomm.plan({"data": 2, "model": 8}).processes == 2
    assert jaxcomm.plan(MESH, machine="cpu", devices_per_process=2).processes == 4
    for axes in ({"data": 12500, "model": 8}, {"a": 100_000}):
        assert jaxcomm.plan(axes).processes == 12500


@pytest.mark.parametrize(
    ("dtype", "backend", "machine", "ranks", "size", "collectives", "moved"),
    [
        # NCCL adds bfloat16 in float32: small sums widen, large ones go in two phases.
        ("bfloat16", None, None, 4, 8, ["all_reduce"], 3),
        ("bfloat16", None, None, 4, 1 << 20, ["all_to_all", "all_gather"], 3 / 2),
        ("bfloat16", None, "cpu", 4, 1 << 20, ["all_reduce"], 3 / 2),
        # Reproducible sums.
        ("float32", "host", "cpu", 8, 1 << 20, ["all_reduce"], 7 / 4),
        ("float32", "nccl", None, 2, 1 << 20, ["all_reduce"], 1),
        ("float32", "nccl", None, 8, 64, ["all_gather"], 7),
        ("float32", "nccl", None, 8, 1 << 20, ["all_to_all", "all_gather"], 7 / 4),
        ("float32", "xla", None, 8, 1 << 20, ["all_to_all", "all_gather"], 7 / 4),
        ("float32", "xla", "cpu", 2, 1 << 20, ["permute"], 1),
        ("float32", "xla", "cpu", 8, 64, ["all_gather"], 7),
        ("float32", "xla", "cpu", 8, 1 << 13, ["permute"] * 3, 3),
        ("float32", "xla", "cpu", 8, 1 << 20, [*["permute"] * 3, "all_gather"], 7 / 4),
        ("float32", "xla", "cpu", 6, 3 << 20, ["all_to_all", "all_gather"], 5 / 3),
    ],
)
def test_what_the_lowering_puts_in_place_of_a_sum_is_planned(
    dtype, backend, machine, ranks, size, collectives, moved
):
    """``moved``: what a rank sends, in operands."""
    x = jax.ShapeDtypeStruct((size,), dtype)

    def step(x):
        is_reproducible = dtype == "float32"
        return jaxcomm.psum(x, "data", reproducible=is_reproducible, backend=backend)

    made = jaxcomm.plan({"data": ranks}, step, x, machine=machine)
    found = [row.call.collective for row in made.calls for _ in range(row.times)]
    assert found == collectives
    served = backend or {None: "nccl", "cpu": "host"}[machine]
    assert {row.call.backend for row in made.calls} == {served}
    sent = sum(row.times * row.sent_bytes for row in made.calls)
    assert sent == pytest.approx(moved * x.dtype.itemsize * size)
