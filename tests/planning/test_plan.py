"""What a plan reads in a program, and what it says of it."""

import dataclasses
import json
import os
import sys

import forked
import jax
import jax.numpy as jnp
import pytest
import waiting

import jaxcomm
from jaxcomm.planning import Attention

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
            lambda x: jaxcomm.pmax(x, "data"),
            lambda x: jaxcomm.pmax(jaxcomm.pmax(x, "data"), "data"),
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


def test_gradients_checkpoints_and_nested_jits_are_read():
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jax.jit(lambda x: jaxcomm.psum(x, "context"))(x))

    # Forward, again for the backward pass, and the transpose.
    assert sum(calls_of(jax.grad(lambda x: layer(x).sum())).values()) >= 2


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


@pytest.mark.parametrize(
    ("size", "machine", "collectives", "operands"),
    [
        (8, None, ["all_reduce"], "float32[8]"),
        (1 << 20, None, ["all_to_all", "all_gather"], "bfloat16[4,262144]"),
        (1 << 20, "cpu", ["all_reduce"], "bfloat16[1048576]"),
    ],
)
def test_what_the_lowering_puts_in_place_is_planned(
    size, machine, collectives, operands
):
    """NCCL adds bfloat16 in float32: small sums widen, large ones go in two phases."""
    x = jax.ShapeDtypeStruct((size,), "bfloat16")
    made = jaxcomm.plan(MESH, lambda x: jaxcomm.psum(x, "context"), x, machine=machine)
    assert [row.call.collective for row in made.calls] == collectives
    assert made.calls[0].call.operands == operands


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
    assert (made.processes, made.startup.rounds) == (1, 0)
    jax.block_until_ready(program(jnp.ones(X.shape)))
    live = jaxcomm.communicators()
    assert [
        (dataclasses.astuple(each.key), each.size, sum(g.count for g in each.groups))
        for each in made.communicators
    ] == [
        ((of.axes, of.index_groups, of.lane, of.backend), of.size, len(of.groups))
        for of in live
    ]
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


def test_attention_comes_from_its_own_plan():
    shape = {"heads": 32, "key_heads": 8, "head_size": 128}
    asked = Attention("context", 1 << 17, times=3, **shape)
    (layers,) = jaxcomm.plan({"data": 2, "context": 8}, asked, machine="h200").attention
    layout, machine = (
        jaxcomm.Layout("zigzag", 8, 1 << 17),
        jaxcomm.Machine.named("h200"),
    )
    own = jaxcomm.attention.plan(layout, is_causal=True, machine=machine, **shape)
    assert layers.plan == own
    assert not layers.crosses
    assert layers.seconds == pytest.approx(3 * own.rows[own.chosen].seconds)
    # Few tokens do not hide a hop over the network.
    short = dataclasses.replace(asked, tokens=8192)
    within = jaxcomm.plan({"context": 8}, short, machine="h200")
    across = jaxcomm.plan({"context": 8, "model": 8}, short, machine="h200")
    assert across.attention[0].crosses
    assert across.attention[0].seconds > within.attention[0].seconds
    assert "between domains" in str(across)


def test_a_strategy_that_sends_to_all_reaches_all_peers():
    asked = Attention("context", 4096, heads=32, head_size=128)
    policy = jaxcomm.CommPolicy(share=False, one_shot=False)
    made = jaxcomm.plan({"context": 8}, asked, machine="h200", policy=policy)
    assert made.attention[0].plan.chosen == "ulysses"
    assert made.communicators[0].peers == 7
    # docs/performance.md: 870 MiB with two neighbors, and 0.75 GiB for two peers more.
    assert made.device_bytes.value == (870 + 3 * 768) * 2**20


@pytest.mark.parametrize(
    ("work", "options", "error", "text"),
    [
        (3, {}, TypeError, "work must be a function"),
        ([3], {}, TypeError, "work must be a function"),
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
def test_what_cannot_be_planned_is_refused(work, options, error, text):
    with pytest.raises(error, match=text):
        jaxcomm.plan(MESH, work, *((X,) if callable(work) else ()), **options)
    with pytest.raises(TypeError, match="but no function"):
        jaxcomm.plan(MESH, None, X)


def test_no_device_is_started():
    """JAX would raise: it knows no platform of this name."""
    code = """if True:
        import jax, jaxcomm
        layers = jaxcomm.planning.Attention(
            "context", 4096, heads=8, head_size=64, local_window_size=(256, 0)
        )
        x = jax.ShapeDtypeStruct((8, 16), "bfloat16")
        work = [(lambda x: jaxcomm.psum(x, "data"), x), layers]
        made = jaxcomm.plan({"data": 2, "context": 4}, work)
        assert str(made) and made.to_json() and made._repr_html_()
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


def test_a_plan_is_text_html_and_json():
    asked = Attention("context", 4096, heads=8, head_size=64)
    work = [(lambda x: jaxcomm.psum(x, "data"), X), asked]
    made = jaxcomm.plan(MESH, work, machine="h100")
    text, chosen = str(made), made.attention[0].plan.chosen
    for part in ("psum", "512 B", chosen, "ranks, by what they hold"):
        assert part in text
    assert text.count("f: formula with the machine's numbers") == 1
    # Every figure says where it is from, but for the bytes that were asked for.
    for cell in text.replace("\n", "  ").split("  "):
        assert not cell.strip().endswith((" us", " ms", " s", "MiB", "GiB", "KiB"))
    assert made._repr_html_().count("<table>") == 4
    document = json.loads(json.dumps(made.to_json()))
    assert document["calls"][0]["name"] == "psum"
    assert document["communicators"][0]["device_bytes"]["origin"].startswith("formula")
    assert document["step_seconds"]["value"] == made.step_seconds.value


def memory_of(size, lanes, machine, **policy):
    """Return the plan of so many communicators of one axis, and its bytes."""
    names = tuple(f"lane {i}" for i in range(lanes))
    policy = jaxcomm.CommPolicy(lanes=13, **policy)
    made = jaxcomm.plan({"a": size}, lanes=names, machine=machine, policy=policy)
    assert [each.peers for each in made.communicators] == [min(size - 1, 2)] * lanes
    return made.device_bytes.value


def test_memory_is_that_of_published_reports_and_of_our_own_measurements():
    # XLA PR 9845: 13 communicators 21.0 GB, 8 of them 14.5 GB; NCCL 864: 1.6 GB.
    for lanes, gigabytes in ((13, 21.0), (8, 14.5), (1, 1.6)):
        found = memory_of(64, lanes, "h100", share=False)
        assert 0.7 <= found / gigabytes / 1e9 <= 1.3
    # docs/performance.md: 870 MiB each; eight that share 218 MiB each, one 806.
    for lanes, mebibytes, policy in (
        (1, 870, {"share": False}),
        (1, 870 / 4, {"share": False, "max_ctas": 8}),
        (1, 806, {"share": True}),
        (8, 8 * 218, {"share": True}),
    ):
        found = memory_of(2, lanes, "h200", one_shot=False, **policy)
        assert found / (1 << 20) == pytest.approx(mebibytes, rel=0.01)


def test_processes_are_those_of_hosts_or_as_many_as_asked():
    assert jaxcomm.plan({"data": 2, "model": 8}).processes == 2
    assert jaxcomm.plan(MESH, machine="cpu", devices_per_process=2).processes == 4


def test_ranks_that_hold_the_same_are_one_row():
    machine = dataclasses.replace(jaxcomm.Machine.named("h200"), domain=4, host=4)
    made = jaxcomm.plan({"a": 2, "b": 3}, lanes="default", machine=machine)
    # Over a, devices 0 and 3 are in one domain, 1 and 4 or 2 and 5 in two. Over b, 0, 1
    # and 2 are in one.
    found = [(each.count, each.example) for each in made.ranks]
    assert found == [(2, 1), (2, 4), (1, 0), (1, 3)]
    for axes in ({"data": 12500, "model": 8}, {"a": 100_000}):
        large = jaxcomm.plan(axes)
        assert [each.count for each in large.ranks] == [100_000]
        assert large.processes == 12500


def test_processes_meet_once_and_once_for_each_communicator():
    """The root writes twice, looks once, and again for each halving of who is missing.

    Between two looks it waits.
    """
    start = jaxcomm.plan(MESH, devices_per_process=1).startup
    assert (start.processes, start.rounds) == (8, 4)
    assert start.messages.value == 4 * (2 + 2 * (1 + 3))
    # Many processes read little more each than few.
    few, many = (
        jaxcomm.plan({"a": size}, devices_per_process=1).startup
        for size in (1_000, 100_000)
    )
    each = [start.store_bytes.value / start.processes for start in (few, many)]
    assert 0 < each[0] <= each[1] < 1.1 * each[0]
    assert few.messages.value < many.messages.value < 2 * few.messages.value
