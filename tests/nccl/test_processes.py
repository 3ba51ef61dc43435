"""Several processes over NCCL: the same results, one team for all."""

import re
import unittest.mock

import jax
import numpy as np
import pytest
import waiting
from stand_in import StandIn

import jaxcomm
from jaxcomm._built import _ffi
from jaxcomm.communicator import hosts
from jaxcomm.primitives import nccl_rewrites

pytestmark = pytest.mark.multiprocess


def collectives(here):
    mesh = here.mesh(2, 2, order=[3, 0, 2, 1])
    x = {dtype: here.values(dtype, (4, 4, 2, 3), 0) for dtype in ("bfloat16", "int32")}
    found = here.run(mesh, lambda x: here.every(x, "i", 4), x)
    here.are_modelled(mesh, ("i",), found, here.models(4), x)
    return [member.transport for member in jaxcomm.communicators()]


def test_every_collective_is_its_model_over_two_processes(team):
    assert team.call(collectives) == [["NCCL 2.32.3"]] * 2


def two_axes(here):
    mesh = here.mesh(2, 2, shape=(2, 2), names=("a", "b"))
    x = here.values("float32", (4, 3), 0)
    # Columns join processes, rows lie within one.
    for axes in (("a",), ("b",)):
        found = here.run(mesh, lambda x, axes=axes: jaxcomm.psum(x, axes), x)
        model = here.model.all_reduce("sum")
        here.identical(mesh, found, here.by_group(mesh, axes, model, x), str(axes))
    members = jaxcomm.communicators()
    by_kernels = [member.stats()["one_shot_calls"] for member in members]
    return [
        jaxcomm.communicators().counters.live,
        [m.backend for m in members],
        by_kernels,
    ]


def test_axes_within_and_across_processes(team):
    """By this package's kernels: they reach memory of the other process, too."""
    assert team.call(two_axes) == [[2, ["nccl", "nccl"], [1, 1]]] * 2


_COPY = "cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2"


def copies(here):
    """Copies between processes, and within one, of odd lengths and of several slots."""
    mesh = here.mesh(2, 2, order=[0, 2, 1, 3])
    # Kernels would do rows.
    jaxcomm.init(mesh, "i", policy=jaxcomm.CommPolicy(one_shot=False))

    def counted(*shape, dtype=np.int32):
        return np.arange(np.prod(shape)).astype(dtype).reshape(shape)

    half = counted(4, (5 << 18) + 1)
    # 33 MiB, and a rank that gets nothing.
    much = counted(4, 33 << 18)
    pairs = [(0, 3), (3, 1), (1, 0)]
    permuted = np.zeros_like(much)
    for source, target in pairs:
        permuted[target] = much[source]
    programs = (
        (lambda x: jaxcomm.ring_shift_start(x, "i").done(), half, np.roll(half, 1, 0)),
        (lambda x: jaxcomm.ppermute(x, "i", pairs), much, permuted),
        (
            lambda x: jax.lax.fori_loop(
                0, 5, lambda _, x: jaxcomm.ring_shift_start(x, "i").done() * 2, x
            ),
            half,
            np.roll(half, 5, 0) * 32,
        ),
    )

    def swap(split):
        return lambda x: jaxcomm.all_to_all(x, "i", split, 1 - split, tiled=True)

    # Rows of a prime number of bytes, to and from the middle of a slot.
    wide = counted(4, 2411, 4, 1031, dtype=np.int8)
    rows = wide.transpose(2, 0, 1, 3)  # by target
    there = rows.reshape(4, 4 * 2411, 1, 1031)
    programs += (swap(1), wide, there), (swap(0), there, wide)

    def both(x):
        """Slots are staged in by their own rank and by another one, by turns."""
        for _ in range(3):
            x = jaxcomm.ring_shift(swap(0)(jaxcomm.ring_shift(swap(1)(x), "i")), "i")
        return x

    mixed = wide
    for _ in range(3):
        moved = np.roll(mixed.transpose(2, 0, 1, 3), 1, 0)
        mixed = np.roll(moved.transpose(1, 2, 0, 3), 1, 0)
    programs += ((both, wide, mixed),)
    counts, by, stand_in = [], [], StandIn()
    least = unittest.mock.patch.object(nccl_rewrites, "_LEAST_STRIDED_BYTES", 0)
    for function, x, expected in programs:
        program, operands = here.program(mesh, function), here.put(mesh, (x,))
        for _ in range(2):
            stand_in.clear()
            with least:
                found = here.mine(program(*operands))
            here.identical(mesh, found, expected)
        counts.append(jaxcomm.communicators()[0].stats()["copied_calls"])
        # An event ends what each stream copies: the call's own waits for the others.
        calls = stand_in.trace(*_COPY, "cuEventRecord")
        last = {call["stream"]: call["name"] for call in calls}
        assert {*last.values()} == {"cuEventRecord"}
        names = {call["name"] for call in calls}
        by.append([name in names for name in _COPY])
    held = jaxcomm.communicators()[0].stats()["device_bytes"]
    return counts, by[-2:], held > (32 << 20)


def test_what_only_moves_is_copied_between_processes(team):
    # Rows without gaps, as they are staged, are one copy.
    by = [[True, True]] * 2
    assert team.call(copies) == [[[2, 4, 14, 16, 18, 42], by, True]] * 2


def exchange_of_rows(here):
    """Where processes are of one host, and where each is of its own."""
    mesh = here.mesh(2, 2, order=[0, 2, 1, 3])
    x = jax.ShapeDtypeStruct(
        (4, 8192, 32, 128), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P("i"))
    )
    transposes = []
    for host in "here", f"host of {here.process}":
        with unittest.mock.patch.object(hosts, "_boot_id", lambda host=host: host):
            jaxcomm.init(mesh, lanes=host[:4])
        lane = host[:4]
        program = here.program(
            mesh,
            lambda x, lane=lane: jaxcomm.all_to_all(
                x, "i", 1, 0, tiled=True, lane=lane
            ),
        )
        transposes.append(program.lower(x).as_text().count("stablehlo.transpose"))
    return transposes


def test_rows_that_leave_a_host_are_transposed(team):
    assert team.call(exchange_of_rows) == [[0, 1]] * 2


def who_moves_rows(here, mesh, policy):
    """What moves rows by the rules of `all_to_all`, and what does it."""
    (one,) = jaxcomm.init(mesh, "i", policy=jaxcomm.CommPolicy(**policy))
    expected, one.connection.row_mover = one.connection.row_mover, "copies"
    size, rows = mesh.size, 5120

    def exchange(x):
        x = jax.numpy.zeros((rows, size, 1024), x.dtype) + x
        return jaxcomm.all_to_all(x, "i", 1, 0, tiled=True)[::rows, 0, 0]

    x = here.values("int8", (size, 1, 1, 1), 0)
    with unittest.mock.patch.object(nccl_rewrites, "_LEAST_STRIDED_BYTES", 0):
        found = here.run(mesh, exchange, x)
    here.identical(mesh, found, x.reshape(1, -1).repeat(size, 0))
    stats = one.stats()
    movers = {"copies": stats["copied_calls"], "kernels": stats["one_shot_calls"]}
    jaxcomm.finalize()
    return expected, next((mover for mover, calls in movers.items() if calls), None)


_MIB = 1 << 20


@pytest.mark.parametrize(
    ("processes", "devices", "policy", "mover"),
    [
        (1, 2, {}, "copies"),
        (1, 3, {}, "kernels"),
        (1, 3, {"one_shot": False}, None),
        (2, 1, {"arena_bytes": 34 * _MIB}, "copies"),
        (2, 1, {"arena_bytes": 34 * _MIB - 1, "one_shot": False}, None),
        (2, 2, {"copy_engines": False}, "kernels"),
        (2, 2, {"copy_engines": False, "one_shot": False}, None),
        (2, 2, {"arena_bytes": 53 * _MIB}, "copies"),
        (2, 4, {}, "kernels"),
        (2, [5, 4], {}, None),
    ],
)
def test_what_moves_rows_is_what_rules_of_exchanges_say(
    team, processes, devices, policy, mover
):
    found = team.call(who_moves_rows, (processes, devices), policy=policy)
    assert found == [[mover, mover]] * processes + [None] * (2 - processes)


def many_communicators(here):
    """Made and closed beside one that stays, then with no room for them."""
    mesh = here.mesh(2, 2, order=[0, 2, 1, 3])
    x = here.values("float32", (4, 1 << 20), 0)

    def shift(lane):
        moved = here.run(mesh, lambda x: jaxcomm.ring_shift(x, "i", lane=lane), x)
        here.identical(mesh, moved, np.roll(x, 1, 0))
        (member,) = (each for each in jaxcomm.communicators() if each.lane == lane)
        return member, member.stats()

    jaxcomm.init(mesh)
    held, own = [], []
    # An arena of 512 MiB has room for ten at a time.
    for lane in map(str, range(12)):
        jaxcomm.init(mesh, lanes=lane)
        member, stats = shift(lane)
        assert stats["copied_calls"] == 1
        row = jaxcomm.memory_report()[-1]
        held.append(row.arena_bytes)
        own.append(row.device_bytes)
        member.close()
    # Who closes first keeps what the other may use still.
    (first,) = jaxcomm.communicators()
    if here.process:
        here.meet("one has closed")
    first.close()
    kept = _ffi.arena_bytes()
    if not here.process:
        here.meet("one has closed")
    jaxcomm.finalize()
    waiting.until(lambda: _ffi.arena_bytes() == 0, "the arena to be given back")
    jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(arena_bytes=0))
    _, stats = shift("default")
    jaxcomm.finalize()
    return (
        held,
        own,
        kept,
        [stats[name] for name in ("copied_calls", "copies", "one_shot")],
    )


def test_the_arena_is_bounded_flat_and_given_back(team):
    full = "no: memory for peers has 0 MiB on this GPU, and "
    for process, each in enumerate(team.call(many_communicators)):
        held, own, kept, (copied, *why) = each
        assert kept == (0 if process else held[0] // 2)
        # Of two communicators, on two devices each: 32 MiB for copies, 19 for kernels.
        assert {*held} == {held[0]}
        assert 4 * (51 << 20) <= held[0] <= 4 * (60 << 20)
        assert min(own) >= 2 * (51 << 20)
        assert copied == 0
        assert all(text.startswith(full) for text in why), why


def ragged_slices(here):
    """Slices in sizes that GPUs read, then some that do not fit, then others again."""
    mesh = here.mesh(2, 2, order=[0, 2, 1, 3])
    policy = jaxcomm.CommPolicy(device_sizes=True, on_failure="poison")
    (member,) = jaxcomm.init(mesh, policy=policy)
    rng = np.random.default_rng(0)
    send = rng.integers(0, 9, (4, 4)).astype(np.int32)
    x, out = (here.values("float32", (4, 40, 5), seed) for seed in range(2))
    starts = np.cumsum(send, 1, np.int32) - send
    places = (np.cumsum(send.T, 1, np.int32) - send.T).T.copy()
    expected = out.copy()
    for source, target in np.ndindex(send.shape):
        begin, count, place = (a[source, target] for a in (starts, send, places))
        expected[target, place : place + count] = x[source, begin : begin + count]

    def exchange(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i")

    def run(*sizes):
        # Small operands would be gathered.
        with unittest.mock.patch.object(nccl_rewrites, "_GATHERED_BYTES", -1):
            return here.run(mesh, exchange, x, out, starts, send, places, *sizes)

    for _ in range(2):
        here.identical(mesh, run(send.T.copy()), expected)
    stats = member.stats()
    wrong = send.T.copy()
    wrong[3, 0] += 1
    here.identical(mesh, run(wrong), np.full_like(out.view(np.int32), -1).view("f4"))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run(send.T.copy())
    jaxcomm.finalize()
    jaxcomm.init(mesh, policy=policy)
    here.identical(mesh, run(send.T.copy()), expected)
    return stats["device_sizes"], stats["device_sized_calls"], str(caught.value)


def test_gpus_read_sizes_between_processes(team):
    for said, calls, error in team.call(ragged_slices):
        assert (said, calls) == ("yes", 2)
        assert re.search(r"rank 0 sends \d rows to rank 3, which expects \d", error)


def one_loses_the_mesh_s_own(here):
    mesh = here.mesh(2, 2)
    jaxcomm.init(mesh, lanes="one")
    if here.process:
        alone = jax.make_mesh((2,), ("i",), devices=jax.local_devices())
        StandIn().fail("ncclCommInitRankConfig", 3)
        with pytest.raises(jaxcomm.CommunicatorError, match="NCCL did not make"):
            jaxcomm.init(alone)
    jaxcomm.init(mesh, lanes="another")
    return len(jaxcomm.communicators())


def test_the_first_gives_out_an_id_where_only_another_needs_one(team):
    assert team.call(one_loses_the_mesh_s_own) == [2, 2]


def one_shrinks_its_own(here):
    """Process 0 shrinks a mesh of itself; then both the one that they share."""
    mesh, x = here.mesh(2, 2), here.values("int32", (4, 3), 0)
    run = here.program(mesh, lambda x: jaxcomm.psum(x, "i"))
    total = np.broadcast_to(x.sum(0, np.int32), x.shape)
    here.identical(mesh, here.mine(run(here.put(mesh, x))), total)
    (shared,) = jaxcomm.communicators()
    if here.process == 0:
        alone = here.mesh(1, 2)
        (own,) = jaxcomm.init(alone)
        assert jaxcomm.shrink(alone, "i") is alone
        # All of a process fail together. Only what needs nobody else is made again.
        assert own.closed
        assert [each.key for each in jaxcomm.communicators()] == [own.key]
    here.meet("process 0 has closed all")
    assert shared.closed == (here.process == 0)
    assert jaxcomm.shrink(mesh, "i") is mesh
    assert shared.key in [each.key for each in jaxcomm.communicators()]
    here.identical(mesh, here.mine(run(here.put(mesh, x))), total)


def test_what_others_share_waits_until_they_shrink_too(team):
    team.call(one_shrinks_its_own)
