import functools
import re

import numpy as np
import pytest
import split
from dense import Options

import jaxcomm
from bench import attention, chain, collectives, masks
from bench.gathered_attention import gathered_attention

OURS_IN_HLO = r"custom_call_target=\"jaxcomm\."


# In these the result has another size than the operand, or the operand another type.
FEW = {"psum", "psum_bf16", "all_gather", "psum_scatter"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.thorough)
        for name in collectives.OPS
    ],
)
def test_every_collective_agrees_with_its_twin(name, session):
    (_, case) = collectives.cases([3], [100], [name])
    (row,) = case.measure(session)
    assert set(row.seconds) == {"jaxcomm", "jax.lax"}
    # Rounded up to an element of four bytes for each rank.
    assert row.payload_bytes == 108


def test_a_step_of_the_chain_communicates_and_computes_nothing_but_its_share():
    (case,) = chain.cases([2])
    ours, xlas = (
        variant.func.lower(*variant.args).compile().as_text()
        for variant in map(case.build().get, ("jaxcomm", "jax.lax"))
    )
    # Compiled away or merged, a step would not be measured.
    assert len(re.findall(OURS_IN_HLO, ours)) == 50
    assert len(re.findall(r" all-reduce\(", xlas)) == 50
    assert not re.findall(OURS_IN_HLO, xlas)
    for text in ours, xlas:
        # XLA fused all earlier sums into a step that used what came before the last.
        fusions = re.findall(r"^ +%?\S*fusion\S* = .* fusion\((.*?)\)", text, re.M)
        assert fusions
        assert {operands.count("%") for operands in fusions} == {2}


def test_a_chain_agrees_with_its_twin(session):
    (case,) = chain.cases([3])
    (row,) = case.measure(session)
    assert row.target is None
    assert set(row.ratios) == {"jax.lax"}


def test_operations_are_counted_once_for_each_visible_key():
    causal = attention.Problem(16384).forward_flops
    assert causal == pytest.approx(4 * 4 * 64 * 16384**2 / 2, rel=1e-4)
    problem = attention.Problem(256)
    assert masks.Masked(problem).forward_flops == problem.forward_flops
    documents = masks.Masked(problem, documents=16).forward_flops
    assert documents == 16 * attention.Problem(16).forward_flops
    window = masks.Masked(problem, window=4).forward_flops
    assert window == 4 * 4 * 64 * (4 * 256 - 6)


def test_gathered_attention_is_exact():
    *arrays, (grad, _) = split.inputs((2, 24, 4, 8))
    local = functools.partial(
        gathered_attention, axis_name="context", schedule="zigzag"
    )
    layout = jaxcomm.Layout("zigzag", 4, 24)
    (dealt, dealt_grad), tokens = layout.reorder((arrays, grad))
    found = split.results(split.sharded(local), dealt, dealt_grad)
    found = [tokens.restore(np.asarray(x)) for x in found]
    split.assert_results(found, arrays, grad, Options(is_causal=True))
