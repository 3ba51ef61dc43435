import re

import jax
import numpy as np
import pytest

import jaxcomm
from bench import attention, chain, collectives, devices, masks, memory, scan
from bench.gathered_attention import gathered_attention

OURS_IN_HLO = r"custom_call_target=\"jaxcomm\."


def compiled_text(variant):
    """The optimized program of a variant, a partial of a jitted function."""
    return variant.func.lower(*variant.args).compile().as_text()


@pytest.mark.parametrize("name", collectives.OPS)
def test_every_collective_agrees_with_its_twin(name, session):
    (_, case) = collectives.cases([3], [100], [name])
    (row,) = case.measure(session)
    assert set(row.seconds) == {"jaxcomm", "jax.lax"}
    # Rounded up to an element of four bytes for each rank.
    assert row.payload_bytes == 108


def test_the_floor_is_a_row_of_its_own(session):
    floor, *ops = collectives.cases([2, 8], [256, 4096], ["psum"])
    (row,) = floor.measure(session)
    assert (row.name, set(row.seconds)) == ("dispatch floor", {"x + 1"})
    assert len(ops) == 7


def test_the_work_is_what_must_be_read_and_written():
    for name, growth in (("psum", 1), ("all_gather", 8), ("psum_scatter", 1 / 8)):
        (_, case) = collectives.cases([8], [256], [name])
        assert case.work == 8 * 256 * (1 + growth)


def test_a_step_of_the_chain_communicates_and_computes_nothing_but_its_share():
    (case,) = chain.cases([2])
    variants = case.build()
    texts = {name: compiled_text(variant) for name, variant in variants.items()}
    # Compiled away or merged, a step would not be measured.
    assert len(re.findall(OURS_IN_HLO, texts["jaxcomm"])) == 50
    assert len(re.findall(r" all-reduce\(", texts["jax.lax"])) == 50
    assert not re.findall(OURS_IN_HLO, texts["jax.lax"])
    for text in texts.values():
        # XLA fused all earlier sums into a step that used what came before the last.
        fusions = re.findall(r"^ +%?\S*fusion\S* = .* fusion\((.*?)\)", text, re.M)
        assert fusions
        assert {operands.count("%") for operands in fusions} == {2}


@pytest.mark.parametrize(
    "suite", [chain, pytest.param(scan, marks=pytest.mark.thorough)]
)
def test_programs_agree_with_their_twins(suite, session):
    for case in suite.cases([3]):
        (row,) = case.measure(session)
        assert row.target is None
        assert set(row.ratios) == {"jax.lax"}


def test_causal_operations_are_counted_once_for_each_visible_key():
    problem = attention.Problem(16384)
    assert problem.forward_flops == pytest.approx(4 * 4 * 64 * 16384**2 / 2, rel=1e-4)


def test_masked_operations_are_counted_once_for_each_visible_key():
    problem = attention.Problem(256)
    of_all = masks.Masked(problem).forward_flops
    assert of_all == problem.forward_flops
    documents = masks.Masked(problem, documents=16).forward_flops
    assert documents == 16 * attention.Problem(16).forward_flops
    window = masks.Masked(problem, window=4).forward_flops
    assert window == 4 * 4 * 64 * (4 * 256 - 6)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_the_rival_ring_uses_the_collective_of_xla(backend):
    x = np.zeros(attention.Problem(64).shape, np.float32)
    attend = attention.attend(backend)
    run = jax.jit(attention.program(attend, devices.mesh_of(2), False))
    text = run.lower(x, x, x, x).as_text()
    assert ("stablehlo.collective_permute" in text) == (backend == "xla")
    assert ("@jaxcomm." in text) == (backend is None)


def test_gathered_attention_is_exact():
    schedule = "zigzag"
    mesh = devices.mesh_of(4)
    query, key, value, grad = (devices.normal((2, 24, 4, 8), i) for i in range(4))
    split = jax.P(None, devices.AXIS)

    def gathered(query, key, value):
        layout = jaxcomm.Layout(schedule, 4, 24)
        dealt, positions = layout.reorder((query, key, value))
        out = jax.shard_map(
            lambda *of: gathered_attention(*of, axis_name="ring", schedule=schedule),
            mesh=mesh,
            in_specs=split,
            out_specs=split,
        )(*dealt)
        return layout.restore(out, positions)

    def dense(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    for attend in (gathered, dense):
        out, transpose = jax.vjp(jax.jit(attend), query, key, value)
        found = out, *transpose(grad)
        if attend is gathered:
            results = found
    for a, b in zip(results, found, strict=True):
        # Float32 in another order of summation.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_memory_is_compared_to_the_smallest_ring(session, monkeypatch):
    def temp_bytes(local, problem, count):
        return 1000 + count

    monkeypatch.setattr(memory, "temp_bytes", temp_bytes)
    (case,) = memory.cases([4, 2], tokens=16)
    first, second = case.measure(session)
    assert (first.devices, second.devices) == (2, 4)
    assert first.growth == {}
    assert first.target is None
    assert set(second.growth) == set(second.temp_bytes) == set(first.temp_bytes)
    assert second.value == pytest.approx(2 / 1002)
    assert second.is_met
