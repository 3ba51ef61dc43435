"""What a plan says agrees with the closed forms and with what is chosen."""

import pytest

import jaxcomm
from jaxcomm.attention import Machine, plan

OF = {"heads": 32, "key_heads": 8, "head_size": 128}


def test_bytes_are_those_of_the_closed_forms():
    size, length = 8, 65536
    found = plan(jaxcomm.Layout("zigzag", size, length), is_causal=True, **OF).rows
    block = 2 * length // size * 8 * 128 * 2
    assert found["ring"].forward_bytes == (size - 1) * block
    assert found["all_gather"].forward_bytes == (size - 1) * block
    # Keys and values travel on in the backward pass, and their gradients in float32.
    assert found["ring"].backward_bytes == (size - 1) * 3 * block
    queries = 2 * length // size * 32 * 128 * 2
    residual = 4 * length // size * 32
    assert found["ulysses"].forward_bytes == (queries + block + residual) * 7 / 8
    assert found["all_gather"].memory == size * block
    assert found["ring"].memory == 2 * block
    pairs = length * (length + 1) / 2
    assert found["ring"].flops == pytest.approx(4 * 32 * 128 * pairs / size, rel=1e-3)
    assert found["ring"].balance == pytest.approx(1)
    assert found["halo"].why_not.startswith("there is no window")
    found = plan(jaxcomm.Layout("contiguous", 8, 8192), is_causal=True, **OF).rows
    assert found["ring"].balance == pytest.approx(15 / 8, rel=1e-2)
    assert found["ulysses"].balance == pytest.approx(1)


def test_a_window_sends_its_border():
    layout = jaxcomm.Layout("contiguous", 8, 65536)
    options = {"is_causal": True, "local_window_size": (4096, 0)}
    found = plan(layout, **options, **OF)
    border = 2 * 4096 * 8 * 128 * 2
    assert found.rows["halo"].forward_bytes == border
    # A rank holds its own keys and values beside what arrives.
    assert found.rows["halo"].memory == 2 * (65536 // 8) * 8 * 128 * 2 + border
    assert found.rows["ring"].sends == 1
    slow = Machine(600e12, 5e9, 15e-6, "slow links")
    assert plan(layout, **options, **OF, machine=slow).chosen == "halo"


def test_a_plan_prints_the_choice_and_why_others_are_not_possible():
    layout = jaxcomm.Layout("contiguous", 6, 6000)
    text = str(plan(layout, **OF, machine="cpu"))
    assert "> " in text
    assert "ulysses     not possible: 6 ranks share 32 query heads and 8 key heads" in (
        text
    )
    assert "table: one core of a server" in text


@pytest.mark.parametrize(
    ("window", "refused"), [((3, -1), ValueError), ((1, True), TypeError)]
)
def test_a_window_that_is_none_is_refused_in_the_plans_name(window, refused):
    layout = jaxcomm.Layout("contiguous", 8, 8192)
    with pytest.raises(refused, match=r"^attention.plan: local_window_size="):
        plan(layout, local_window_size=window, **OF)
