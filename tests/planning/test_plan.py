"""What a plan reads in a program, says of it, and warns of."""

import collections
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.planning import Attention

X = jax.ShapeDtypeStruct((8, 16), "float32")
MESH = {"data": 2, "context": 4}


def counts(made):
    return {
        (row.call.name, row.call.axes, row.call.operands): row.times
        for row in made.calls
    }


def per_device(function, *args, mesh=MESH, **options):
    return jaxcomm.plan(mesh, function, *(args or (X,)), **options)


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
    assert counts(per_device(step)) == {
        ("psum", ("context",), operands): 5 + 6,
        ("ring_shift", ("data",), operands): 4,
        ("pmax", ("data",), operands): 2,
    }


def test_a_while_counts_once_and_says_so():
    made = per_device(
        lambda x: jax.lax.while_loop(
            lambda x: x.sum() < 3, lambda x: jaxcomm.psum(x, "data"), x
        )
    )
    assert list(counts(made).values()) == [1]
    assert "while loop" in made.notes[0]
    assert "note: a while loop" in str(made)


def test_gradients_checkpoints_and_nested_jits_are_read():
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jax.jit(lambda x: jaxcomm.psum(x, "context"))(x))

    made = per_device(jax.grad(lambda x: layer(x).sum()))
    # Forward, again for the backward pass, and the transpose.
    assert sum(counts(made).values()) >= 2


def test_a_program_over_global_arrays_has_local_operands():
    spec = jax.P("data", "context")
    program = jax.jit(
        jax.shard_map(lambda x: jaxcomm.psum(x, "data"), in_specs=spec, out_specs=spec)
    )
    assert list(counts(jaxcomm.plan(MESH, program, X))) == [
        ("psum", ("data",), "float32[4,4]")
    ]
    types = (jax.sharding.AxisType.Auto,) * 2
    abstract = jax.sharding.AbstractMesh((2, 4), ("data", "context"), axis_types=types)
    assert counts(jaxcomm.plan(abstract, program, X)) == counts(
        jaxcomm.plan(MESH, program, X)
    )


def test_the_planned_mesh_holds_and_not_the_one_that_is_set(make_mesh):
    def shrink(x):
        return jaxcomm.psum_scatter(x, "data", tiled=True)

    x = jax.ShapeDtypeStruct((32, 16), "float32")
    spec = jax.P("data", "context")
    for program in (jax.shard_map(shrink, in_specs=spec, out_specs=spec), shrink):
        planned = [jaxcomm.plan({"data": 4, "context": 4}, program, x)]
        with jax.set_mesh(make_mesh(data=2, context=4)):
            planned.append(jaxcomm.plan({"data": 4, "context": 4}, program, x))
        assert counts(planned[0]) == counts(planned[1])


def test_a_program_with_a_mesh_of_its_own_is_read(make_mesh):
    mesh = make_mesh(data=2, context=4)
    spec = jax.P("data", "context")
    program = jax.shard_map(
        lambda x: jaxcomm.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert len(jaxcomm.plan(mesh, program, X).calls) == 1
    with pytest.raises(ValueError, match="Give plan the mesh of the function"):
        jaxcomm.plan({"data": 4, "context": 2}, program, X)


def test_collectives_of_jax_are_xlas():
    made = per_device(lambda x: jax.lax.psum(jax.lax.all_gather(x, "data"), "context"))
    assert [(row.call.name, row.call.backend) for row in made.calls] == [
        ("lax.all_gather", "xla"),
        ("lax.psum", "xla"),
    ]
    # XLA's communicators are not ours to count.
    assert made.communicators == ()


def test_what_the_lowering_puts_in_place_is_planned():
    """NCCL adds bfloat16 in float32: small sums widen, large ones go in two phases."""
    small = per_device(
        lambda x: jaxcomm.psum(x, "context"), jax.ShapeDtypeStruct((8,), "bfloat16")
    )
    assert [row.call.operands for row in small.calls] == ["float32[8]"]
    large = per_device(
        lambda x: jaxcomm.psum(x, "context"),
        jax.ShapeDtypeStruct((1 << 20,), "bfloat16"),
    )
    assert [row.call.collective for row in large.calls] == ["all_to_all", "all_gather"]
    on_cpu = per_device(
        lambda x: jaxcomm.psum(x, "context"),
        jax.ShapeDtypeStruct((1 << 20,), "bfloat16"),
        machine="cpu",
    )
    assert [row.call.collective for row in on_cpu.calls] == ["all_reduce"]


def test_communicators_are_those_that_a_run_makes(make_mesh):
    mesh = make_mesh(data=2, context=4)

    def step(x):
        x = jaxcomm.psum(x, "data") + jaxcomm.ring_shift(x, "context", lane="ring")
        return jaxcomm.all_gather(x, ("data", "context")).sum(0) + jaxcomm.psum(
            x, "context", axis_index_groups=[[0, 1], [2, 3]]
        )

    program = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=jax.P("data", "context"),
            out_specs=jax.P("data", "context"),
            check_vma=False,
        )
    )
    made = jaxcomm.plan(mesh, program, X, machine="cpu")
    jax.block_until_ready(program(jnp.ones(X.shape)))
    live = jaxcomm.communicators()
    assert [
        (each.key.axes, each.key.index_groups, each.key.lane, each.key.backend)
        for each in made.communicators
    ] == [(each.axes, each.index_groups, each.lane, each.backend) for each in live]
    assert [
        (each.size, sum(group.count for group in each.groups))
        for each in made.communicators
    ] == [(each.size, len(each.groups)) for each in live]
    assert len(made.communicators) == jaxcomm.counters().live
    calls = {}
    for row in made.calls:
        groups = row.call.axes, row.call.index_groups, row.call.lane
        calls.setdefault(groups, {})[row.call.collective] = row.times
    assert calls == {
        (each.axes, each.index_groups, each.lane): each.stats()["calls"]
        for each in live
    }


def test_ring_attention_is_as_many_hops_as_a_run_makes(make_mesh):
    mesh = make_mesh(context=4)
    layout = jaxcomm.Layout("zigzag", 4, 64)
    spec = jax.P(None, "context")
    attend = jax.shard_map(
        lambda q, k, v, positions: jaxcomm.ring_attention(
            *(q, k, v),
            axis_name="context",
            layout=layout,
            positions=positions,
            is_causal=True,
        ),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    program = jax.jit(jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2)))
    x, positions = layout.reorder(jnp.ones((1, 64, 4, 8)))
    made = jaxcomm.plan(mesh, program, x, x, x, positions, machine="cpu")
    jax.block_until_ready(program(x, x, x, positions))
    (ring,) = jaxcomm.communicators()
    calls = collections.Counter()
    for row in made.calls:
        calls[row.call.collective] += row.times
    assert ring.stats()["calls"] == calls
    assert set(calls) == {"permute", "check_positions"}
    # Of one group, by the ranks of this process.
    assert ring.stats()["bytes"] == 4 * sum(
        row.times * row.call.bytes for row in made.calls
    )


def test_attention_comes_from_its_own_plan():
    asked = Attention("context", 1 << 17, heads=32, key_heads=8, head_size=128, times=3)
    made = jaxcomm.plan({"data": 2, "context": 8}, asked, machine="h200")
    (layers,) = made.attention
    own = jaxcomm.attention.plan(
        jaxcomm.Layout("zigzag", 8, 1 << 17),
        heads=32,
        key_heads=8,
        head_size=128,
        is_causal=True,
        machine=jaxcomm.Machine.named("h200"),
    )
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


def test_the_chosen_strategy_reaches_peers():
    asked = Attention("context", 4096, heads=32, head_size=128)
    made = jaxcomm.plan({"context": 8}, asked, machine="h200")
    assert made.attention[0].plan.chosen == "ulysses"
    assert made.communicators[0].peers == 7


@pytest.mark.parametrize(
    ("mesh", "work", "error", "text"),
    [
        (MESH, 3, TypeError, "work must be a function"),
        (MESH, [3], TypeError, "work must be a function"),
        (MESH, lambda x: jaxcomm.psum(x, "z"), NameError, "unbound axis name: z"),
    ],
)
def test_what_cannot_be_planned_is_refused(mesh, work, error, text):
    args = (X,) if callable(work) else ()
    with pytest.raises(error, match=text):
        jaxcomm.plan(mesh, work, *args)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="machine 'abacus' is unknown"):
        jaxcomm.plan(MESH, machine="abacus")
    with pytest.raises(TypeError, match="machine must be a name"):
        jaxcomm.plan(MESH, machine=3)
    with pytest.raises(TypeError, match="policy must be"):
        jaxcomm.plan(MESH, policy="shared")
    with pytest.raises(ValueError, match="devices_per_process must be at least 1"):
        jaxcomm.plan(MESH, devices_per_process=0)
    with pytest.raises(ValueError, match="plan: lane must be a non-empty string"):
        jaxcomm.plan(MESH, lanes=("",))
    with pytest.raises(ValueError, match="backend 'gloo' is unknown; choose one of"):
        jaxcomm.plan(MESH, backend="gloo")
    with pytest.raises(TypeError, match="but no function"):
        jaxcomm.plan(MESH, None, X)


def test_a_users_own_error_is_raised():
    def wrong(x):
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        per_device(wrong)


@pytest.mark.parametrize("axes", [{"data": 12500, "model": 8}, {"a": 100_000}])
def test_a_hundred_thousand_devices_are_planned_in_a_tenth_of_a_second(axes):
    took = []
    for _ in range(7):
        # Of this thread: what others do on this machine is no cost of a plan.
        begun = time.thread_time()
        made = jaxcomm.plan(axes)
        took.append(time.thread_time() - begun)
    assert min(took) < 0.1
    assert sum(each.count for each in made.ranks) == 100_000


def test_no_device_is_started(alone):
    assert (
        alone(
            """
            import jax, jaxcomm
            from jax._src import xla_bridge
            layers = jaxcomm.planning.Attention(
                "context", 4096, heads=8, head_size=64, local_window_size=(256, 0)
            )
            x = jax.ShapeDtypeStruct((8, 16), "bfloat16")
            made = jaxcomm.plan(
                {"data": 2, "context": 4},
                [(lambda x: jaxcomm.psum(x, "data"), x), layers],
            )
            str(made), made.to_json(), made._repr_html_()
            print(xla_bridge.backends_are_initialized())
            """
        )
        == "False"
    )


def test_a_plan_is_text_html_and_json():
    asked = [
        (lambda x: jaxcomm.psum(x, "data"), X),
        Attention("context", 4096, heads=8, head_size=64),
    ]
    made = jaxcomm.plan(MESH, asked, machine="h100")
    text = str(made)
    chosen = made.attention[0].plan.chosen
    for part in ("psum", "512 B", chosen, "ranks, by what they hold"):
        assert part in text
    assert text.count("f: formula with the machine's numbers") == 1
    drawn = made._repr_html_()
    assert drawn.count("<table>") == 4
    document = json.loads(json.dumps(made.to_json()))
    assert document["calls"][0]["name"] == "psum"
    assert document["communicators"][0]["device_bytes"]["origin"].startswith("formula")
    assert document["step_seconds"]["value"] == made.step_seconds.value


def test_every_figure_says_where_it_is_from():
    made = jaxcomm.plan(MESH, lambda x: jaxcomm.psum(x, "data"), X)
    for line in str(made).splitlines():
        for cell in line.split("  "):
            if cell.strip().endswith((" us", " ms", " s", "MiB", "GiB", "KiB")):
                # The bytes of an operand are what was asked for.
                pytest.fail(f"no origin: {cell.strip()!r} in {line!r}")


def test_memory_is_that_of_published_reports():
    """XLA PR 9845: 13 communicators 21.0 GB, 8 of them 14.5 GB; NCCL 864: 1.6 GB."""
    machine = jaxcomm.Machine.named("h100")
    policy = jaxcomm.CommPolicy(share=False, lanes=13)

    def held(lanes):
        names = tuple(f"lane {i}" for i in range(lanes))
        made = jaxcomm.plan({"a": 64}, lanes=names, machine=machine, policy=policy)
        assert len(made.communicators) == lanes
        return made.device_bytes.value

    assert 0.7 <= held(13) / 21.0e9 <= 1.3
    assert 0.7 <= held(8) / 14.5e9 <= 1.3
    assert 0.7 <= held(1) / 1.6e9 <= 1.3


def test_memory_is_that_of_our_own_measurements():
    """docs/performance.md: 870 MiB each; eight that share 218 MiB each, one 806."""
    mib = 1 << 20
    plain = {"one_shot": False, "lanes": 8}

    def held(lanes, **policy):
        made = jaxcomm.plan(
            {"a": 2},
            lanes=tuple(f"lane {i}" for i in range(lanes)),
            machine="h200",
            policy=jaxcomm.CommPolicy(**plain, **policy),
        )
        return made.device_bytes.value

    assert held(1, share=False) == 870 * mib
    assert held(1, share=True) == 806 * mib
    assert held(8, share=True) / 8 == pytest.approx(218 * mib, rel=0.01)
    assert held(1, share=False, max_ctas=8) == 870 * mib / 4


def test_a_mesh_of_cpu_devices_is_planned_for_cpus(make_mesh):
    made = jaxcomm.plan(make_mesh(data=2, context=4))
    assert made.machine.platform == "cpu"
    assert {each.key.backend for each in made.communicators} == {"host"}
    assert jaxcomm.plan(MESH).machine.platform == "gpu"


def test_processes_of_a_mesh_are_those_of_its_devices(make_mesh):
    assert jaxcomm.plan(make_mesh(data=2, context=4)).processes == 1
    assert jaxcomm.plan(MESH, machine="cpu", devices_per_process=2).processes == 4


def test_ranks_that_hold_the_same_are_one_row():
    machine = dataclasses.replace(jaxcomm.Machine.named("h200"), domain=4, host=4)
    made = jaxcomm.plan({"a": 2, "b": 3}, lanes="default", machine=machine)
    assert sum(each.count for each in made.ranks) == 6
    assert len(made.ranks) > 1


# ---- warnings


def test_communicators_that_do_not_fit_are_warned_of():
    machine = dataclasses.replace(jaxcomm.Machine.named("h100"), memory=2e9)
    policy = jaxcomm.CommPolicy(share=False)
    made = jaxcomm.plan(MESH, machine=machine, policy=policy)
    assert any("do not fit into" in text for text in made.warnings)
    assert "warning: " in str(made)
    assert jaxcomm.plan(MESH, machine="h100").warnings == ()


def test_more_communicators_than_allowed_are_warned_of(monkeypatch):
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "2")
    assert any("JAXCOMM_MAX_COMMUNICATORS" in w for w in jaxcomm.plan(MESH).warnings)


def test_more_lanes_than_allowed_are_warned_of():
    made = jaxcomm.plan({"a": 2}, lanes=("one", "two", "three"))
    assert any("init would raise" in text for text in made.warnings)


def test_an_axis_that_crosses_domains_in_vain_is_warned_of():
    def step(x):
        for _ in range(8):
            x = jaxcomm.psum(x, "model")
        return jaxcomm.psum(x, "data")

    heavy = jax.ShapeDtypeStruct((1 << 22,), "float32")
    good = jaxcomm.plan({"data": 4, "model": 8}, step, heavy)
    turned = jaxcomm.plan({"model": 8, "data": 4}, step, heavy)
    (warning,) = turned.warnings
    assert warning.startswith("axis 'model' crosses domains and need not: in the order")
    assert good.warnings == ()
    assert turned.step_seconds.value > good.step_seconds.value
    # Without a step there is nothing to compare.
    assert "would fit into one" in jaxcomm.plan({"data": 4, "model": 8}).warnings[0]


def pair(second_lane, done_first=False, axes=("data", "context")):
    def step(x):
        handle = jaxcomm.psum_start(x, axes[0])
        if done_first:
            x = handle.done()
        other = jaxcomm.ring_shift_start(x, axes[1], lane=second_lane)
        return (0 if done_first else handle.done()) + other.done()

    return [w for w in per_device(step).warnings if "circle" in w]


def test_independent_operations_on_crossing_groups_are_warned_of():
    (warning,) = pair("ring")
    assert warning.startswith("psum over ('data',) and ring_shift over ('context',)")
    assert "cross in one device" in warning
    (same_axes,) = pair("ring", axes=("data", "data"))
    assert "share 2 devices" in same_axes
    # NCCL runs what shares resources one after the other; and a dependence is an order.
    assert pair(None) == []
    assert pair("ring", done_first=True) == []


def test_a_window_that_wants_a_halo_is_warned_of():
    asked = Attention(
        *("context", 1 << 17),
        heads=32,
        head_size=128,
        schedule="striped",
        local_window_size=(1024, 0),
    )
    made = jaxcomm.plan({"context": 8}, asked, machine="h200")
    (warning,) = made.warnings
    assert "schedule='contiguous' sends a border to the next rank" in warning
    asked = dataclasses.replace(asked, schedule="contiguous")
    assert jaxcomm.plan({"context": 8}, asked, machine="h200").warnings == ()


def test_many_processes_read_little_more_each_than_few():
    few, many = (
        jaxcomm.plan({"a": size}, devices_per_process=1).startup
        for size in (1_000, 100_000)
    )
    each = [start.store_bytes.value / start.processes for start in (few, many)]
    assert 0 < each[0] <= each[1] < 1.1 * each[0]
    assert few.messages.value < many.messages.value < 2 * few.messages.value
