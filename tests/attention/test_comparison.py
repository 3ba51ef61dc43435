"""Comparisons agree with the closed forms, and "auto" chooses as it always did."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.attention import compare_strategies

OF = {"heads": 32, "key_heads": 8, "head_size": 128}
LETTERS = {"ring": "r", "all_gather": "a", "ulysses": "u", "usp": "s", "halo": "h"}


def test_bytes_are_those_of_the_closed_forms():
    size, length = 8, 65536
    layout = jaxcomm.Layout("zigzag", size, length)
    found = compare_strategies(layout, is_causal=True, **OF).rows
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
    layout = jaxcomm.Layout("contiguous", 8, 8192)
    found = compare_strategies(layout, is_causal=True, **OF).rows
    assert found["ring"].balance == pytest.approx(15 / 8, rel=1e-2)
    assert found["ulysses"].balance == pytest.approx(1)
    # Tokens of late ranks see no more than others: they see their documents alone.
    layout = jaxcomm.Layout("contiguous", 2, 32768)
    assert compare_strategies(layout, is_causal=True, **OF).chosen == "ulysses"
    found = compare_strategies(layout, is_causal=True, has_documents=True, **OF)
    assert found.chosen == "ring"
    assert found.rows["ring"].balance == 1


def test_a_window_sends_its_border():
    layout = jaxcomm.Layout("contiguous", 8, 65536)
    options = {"is_causal": True, "local_window_size": (4096, 0)}
    found = compare_strategies(layout, **options, **OF)
    border = 2 * 4096 * 8 * 128 * 2
    assert found.rows["halo"].forward_bytes == border
    # A rank holds its own keys and values beside what arrives.
    assert found.rows["halo"].memory == 2 * (65536 // 8) * 8 * 128 * 2 + border
    assert found.rows["ring"].sends == 1
    slow = dataclasses.replace(jaxcomm.Machine.named("h200"), bytes_per_second=5e9)
    assert compare_strategies(layout, **options, **OF, machine=slow).chosen == "halo"


def test_a_choice_keeps_nothing_of_a_layout_that_is_traced():
    """With its order a cache would keep the whole trace."""

    def choose(order):
        layout = jaxcomm.Layout("contiguous", 4, 8, order)
        return len(compare_strategies(layout, **OF).rows)

    with jax.checking_leaks():
        jax.make_jaxpr(choose)(jnp.arange(8).reshape(4, 2))


# By machine and schedule, a letter for each problem of the next test.
CHOICES = {
    ("gpu", "contiguous"): "rrrrrrrrrrrruuhhrrhhrrhhaaaaaaaaaaaa"
    "rrhhrrhhuuhhuuuuuuuuaaaauuhhuuhhrrhh",
    ("gpu", "zigzag"): "rrrrrrrrrrrrrrrrrrhhrrrraaaaaaaaaaaa"
    "rrrrrrhhrrhhaauuuuuuaaaarrrrrrhhrrhh",
    ("gpu", "striped"): "rrrrrrrrrrrrrrrrrrrrrrrraaaaaaaaaaaa"
    "rrrrrrsarraaaaaauuuuaaaarruurruurraa",
    ("cpu", "contiguous"): "uuuuuuuuuuuuuuuuuuuuuuuusrrrsrrruuuu"
    "srhhsrhhuuhhuuuuuuuusrrruuhhuuhhsrhh",
    ("cpu", "zigzag"): "rrrrrrrrrrrrrruurruurruurrrrrrrrrruu"
    "rrrrrrrrrrrrrruurruurrrrrrrrrrrrrrrr",
    ("cpu", "striped"): 72 * "r",
}


@pytest.mark.parametrize(("machine", "schedule"), CHOICES)
def test_choices_are_those_of_the_first_model_of_times(machine, schedule):
    """A change that moves one of them needs a run that shows the new one faster."""
    found = ""
    for size, tokens, (heads, key_heads), window in itertools.product(
        (2, 6, 8), (256, 4096), ((32, 8), (8, 8), (6, 2)), (None, (1024, 0))
    ):
        layout = jaxcomm.Layout(schedule, size, size * tokens)
        for axis_sizes in ((size,), (2, size // 2)):
            compared = compare_strategies(
                layout, heads=heads, key_heads=key_heads, head_size=128,
                is_causal=True, local_window_size=window, axis_sizes=axis_sizes,
                machine=machine,
            )  # fmt: skip
            found += LETTERS[compared.chosen]
    assert found == CHOICES[machine, schedule]


def test_a_comparison_prints_the_choice_and_why_others_are_not_possible():
    layout = jaxcomm.Layout("contiguous", 6, 6000)
    found = compare_strategies(layout, **OF, machine="cpu")
    _, _, ring, *_ = str(found).splitlines()
    assert ring.split()[:2] == [">", "ring"]
    assert ring.split()[-1] == "1.00"
    assert "\n  ulysses is not possible: 6 ranks share 32 query heads" in str(found)


@pytest.mark.parametrize(
    ("window", "refused"), [((3, -1), ValueError), ((1, True), TypeError)]
)
def test_a_window_that_is_none_is_refused_in_its_name(window, refused):
    layout = jaxcomm.Layout("contiguous", 8, 8192)
    with pytest.raises(refused, match=r"^compare_strategies: local_window_size="):
        compare_strategies(layout, local_window_size=window, **OF)
