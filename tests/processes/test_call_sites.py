"""The same place of the same run on every process, whatever the programs look like."""

import concurrent.futures
import hashlib

import jax
import numpy as np
import pytest
import waiting

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Runs that nobody waits for. At about 32 on a device XLA:CPU blocks for ever, with its
# own collectives as with ours.
UNAWAITED = 12


def programs_of_one_name(here, mesh, same):
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
            expected = [sum_of(scaled), np.roll(scaled, 1, 0)]
            here.identical(mesh, here.mine(found[k]), expected, f"run {start + k}")


@pytest.mark.parametrize("same", [True, False], ids=["same text", "another constant"])
def test_programs_of_one_name_and_signature_keep_apart(team, same):
    team.call(programs_of_one_name, at=(2, 2), same=same)


def compiled_ahead(here, mesh):
    run = here.program(mesh, lambda x: jaxcomm.psum(jaxcomm.psum(x, "i") % 91, "i"))
    x = here.values("int32", (4, 3), 0) % 1000
    expected = sum_of(sum_of(x) % 91)
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
    here.identical(mesh, here.mine(other(operand)), sum_of(x + 1))


def test_programs_compiled_ahead_of_time_meet_the_others(team):
    team.call(compiled_ahead, at=(2, 2))


def two_functions_in_another_order(here, mesh):
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
    team.call(two_functions_in_another_order, at=(2, 1))


def everything(x):
    tree = jaxcomm.psum({"x": x, "n": x.astype("int32")}, ("b", "a"))
    return (
        tree["x"] + jaxcomm.ring_shift(x, ("a", "b")),
        jaxcomm.pscan(x, "a", lane="other"),
        jaxcomm.all_gather(tree["n"], "b", axis=1),
    )


def lowered_text(here, mesh):
    # What differs between processes must not enter the program.
    junk = [bytearray(1000 * here.process + 1) for _ in range(here.process + 1)]
    for _ in junk:
        here.program(mesh, lambda x: x + 1)(here.put(mesh, np.ones(mesh.size)))
    jaxcomm.init(mesh, "a", lanes=("default", "other"))
    program = here.program(mesh, everything)
    text = program.lower(here.put(mesh, np.ones((mesh.size, 3), np.float32))).as_text()
    assert "jaxcomm.all_reduce" in text
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_process_lowers_the_same_text(team):
    digests = team.call(lowered_text, at=(3, 2, (3, 2), ("a", "b")))
    assert digests == [digests[0]] * 3 + [None]


def options_of_attention(here, mesh):
    x = here.put(mesh, np.ones((2, 1, 2, 2, 4), np.float32))
    layout = jaxcomm.Layout("contiguous", 2, 4)

    def attend(scale, strategy):
        def local(x):
            return jaxcomm.ring_attention(
                x, x, x, "i", layout, scale=scale, strategy=strategy
            )

        return here.program(mesh, local)

    texts = []
    for strategy in ("ring", "all_gather", "ulysses"):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as caught:
            here.mine(attend((0.5, 0.25)[here.process], strategy)(x))
        texts.append(str(caught.value))
        jaxcomm.finalize()
    same = attend(0.5, "ring")
    here.identical(mesh, here.mine(same(x)), np.ones(x.shape, np.float32))
    text = same.lower(x).as_text()
    return texts, hashlib.sha256(text.encode()).hexdigest()


def test_options_of_attention_that_differ_raise_on_every_process(team):
    """Nothing that is sent shows them; programs of equal ones have one text."""
    found = team.call(options_of_attention, at=(2, 1))[:2]
    for texts, _ in found:
        for text in texts:
            assert "of ring_attention(scale=0.5" in text
            assert "of ring_attention(scale=0.25" in text
    assert found[0][1] == found[1][1]
