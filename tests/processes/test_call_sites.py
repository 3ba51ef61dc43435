"""The same place of the same run on every process, whatever the programs look like."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Runs that nobody waits for. At about 32 on a device XLA:CPU blocks for ever, with its
# own collectives as with ours.
UNAWAITED = 12


def busy(x, turns):
    """Returns ``x`` after so many turns of a loop that XLA cannot drop."""
    spent = jax.lax.fori_loop(0, turns, lambda k, v: (v * 3 + k) % 7, jnp.int32(0))
    return x + jnp.minimum(spent, 0).astype(x.dtype)


def equal_calls_on_independent_data(here, processes, devices):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return

    @jax.jit
    def inner(x):
        return jaxcomm.psum(x, "i"), jaxcomm.all_gather(x, "i")

    def program(x, y, turns):
        # Which of the two is ready first is another question on every device.
        return inner(busy(x, turns[0])), inner(busy(y, turns[1]))

    run = here.program(mesh, program)
    rng = np.random.default_rng(0)
    for seed in range(30):
        count = (3, 5000)[seed % 2]
        x = here.values("int32", (mesh.size, count), seed)
        y = here.values("int32", (mesh.size, count), seed + 1000)
        turns = rng.integers(0, 3000, (mesh.size, 2)).astype(np.int32)
        found = here.mine(run(*here.put(mesh, (x, y, turns))))
        for (total, gathered), operand in zip(found, (x, y), strict=True):
            sums = here.by_group(mesh, ("i",), here.model.all_reduce("sum"), operand)
            here.identical(mesh, total, sums, f"psum, run {seed}")
            every = here.by_group(mesh, ("i",), here.model.all_gather(), operand)
            here.identical(mesh, gathered, every, f"all_gather, run {seed}")


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_equal_calls_on_independent_data_keep_apart(team, processes, devices):
    team.call(equal_calls_on_independent_data, processes=processes, devices=devices)


def programs_of_one_name(here, same):
    mesh = here.mesh(2, 2)
    if mesh is None:
        return

    def make(factor):
        def scaled(x):
            return jaxcomm.psum(x * factor, "i"), jaxcomm.ring_shift(x * factor, "i")

        return here.program(mesh, scaled)

    factors = (3, 3) if same else (3, 5)
    programs = [make(factor) for factor in factors]
    for start in range(0, 60, UNAWAITED):
        x = [here.values("int32", (4, 6), start + k) % 1000 for k in range(UNAWAITED)]
        placed = [here.put(mesh, operand) for operand in x]
        # None is waited for: a process may be ahead of the others by several runs.
        found = [programs[k % 3 // 2](operand) for k, operand in enumerate(placed)]
        for k, operand in enumerate(x):
            scaled = operand * np.int32(factors[k % 3 // 2])
            expected = [
                sum_of(scaled),
                np.roll(scaled, 1, 0),
            ]
            here.identical(mesh, here.mine(found[k]), expected, f"run {start + k}")


@pytest.mark.parametrize("same", [True, False], ids=["same text", "another constant"])
def test_programs_of_one_name_and_signature_keep_apart(team, same):
    team.call(programs_of_one_name, same=same)


def compiled_ahead(here):
    mesh = here.mesh(2, 2)
    if mesh is None:
        return
    run = here.program(mesh, lambda x: jaxcomm.psum(jaxcomm.psum(x, "i") % 91, "i"))
    x = here.values("int32", (4, 3), 0) % 1000
    expected = np.broadcast_to(4 * (x.sum(0) % 91), x.shape).astype(np.int32)
    operand = here.put(mesh, x)
    ahead = run.lower(operand).compile()
    again = run.lower(operand).compile()
    for program in (ahead, run, again, run, ahead):
        here.identical(mesh, here.mine(program(operand)), expected)
    jax.clear_caches()
    for program in (run, ahead, again):
        here.identical(mesh, here.mine(program(operand)), expected)
    # Only some processes look at the program before they run it.
    other = here.program(mesh, lambda x: jaxcomm.psum(x + 1, "i"))
    if here.process == 1:
        other.lower(operand).compile().cost_analysis()
    total = np.broadcast_to(x.sum(0) + 4, x.shape).astype(np.int32)
    here.identical(mesh, here.mine(other(operand)), total)


def test_programs_compiled_ahead_of_time_meet_the_others(team):
    team.call(compiled_ahead)


def one_process_ahead(here, collective):
    """Rank 0 sends and waits for nobody; the others take their time to receive."""
    mesh = here.mesh(2, 1)
    if mesh is None:
        return
    steps = 100
    calls = {
        "ppermute": lambda x: jaxcomm.ppermute(x, "i", [(0, 1)]),
        "broadcast": lambda x: jaxcomm.pbroadcast(jnp.full((20_000,), x), "i", 0)[-1],
    }

    def program(x):
        def step(count, _):
            turns = jnp.where(jax.lax.axis_index("i") == 0, 0, 20_000)
            return count + 1, calls[collective](busy(count, turns))

        return jax.lax.scan(step, x, jnp.arange(steps))[1]

    found = here.run(mesh, program, np.zeros(2, np.int32))
    sent = np.tile(np.arange(steps, dtype=np.int32), (2, 1))
    if collective == "ppermute":
        sent[0] = 0  # it receives nothing
    here.identical(mesh, found, sent, collective)


@pytest.mark.parametrize("collective", ["ppermute", "broadcast"])
def test_what_a_process_sends_ahead_arrives_in_order(team, collective):
    team.call(one_process_ahead, collective=collective)


def two_functions_in_another_order(here):
    mesh = here.mesh(2, 1)
    if mesh is None:
        return

    def first(x):
        return jaxcomm.psum(x, "i")

    def second(x):
        return jaxcomm.psum(x, "i")

    split = jax.P("i")
    programs = [  # by their own names
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split))
        for f in (first, second)
    ]
    for program in programs:  # compiled, in one order
        here.mine(program(*here.put(mesh, [np.zeros((2, 3), np.int32)])))
    (member,) = jaxcomm.communicators()

    def run(n, operand):
        placed = here.put(mesh, operand)
        if n != here.process:
            # The other one first: it waits for the other process, or is done.
            waiting.until(lambda: begun[here.process] or member.stats()["in_flight"])
        found = here.mine(programs[n](placed))
        begun[n] = True
        here.identical(mesh, found, sum_of(operand), f"function {n}")

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for turn in range(5):
            begun = [False, False]
            operands = [here.values("int32", (2, 3), 2 * turn + n) for n in range(2)]
            list(threads.map(run, range(2), operands))


def sum_of(x):
    return np.broadcast_to(x.sum(0, np.int32), x.shape)


def test_functions_of_different_names_are_told_apart(team):
    """C7: two threads that dispatch them in another order on each process."""
    team.call(two_functions_in_another_order)
