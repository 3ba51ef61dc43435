"""The table "Which one do I take?" of docs/attention.md says what is chosen."""

import re
from pathlib import Path

import pytest

from jaxcomm import Layout
from jaxcomm.attention import compare_strategies, document_layout

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
SIZE, LENGTH = 4, 32768
OF = {"heads": 32, "key_heads": 8, "head_size": 128}
SCHEDULES = "contiguous", "zigzag", "striped"
CAUSAL = {"is_causal": True}
# Each row's first cell, and the call that it means.
CALLS = {
    "a window": CAUSAL | {"local_window_size": (512, 0)},
    "not causal": {},
    "causal, many short documents": CAUSAL | {"has_documents": True},
    "causal, two mesh axes for tokens": CAUSAL | {"axis_sizes": (2, 2)},
    "causal, all others": CAUSAL,
}


def rows():
    """Return the strategy and the layout of each row for ``ring_attention``."""
    table = re.search(
        r"^\| `shard_map`: `ring_attention`.*?\n\n", PAGE.read_text(), re.M | re.S
    )
    lines = [
        line.strip("| ").split(" | ") for line in table[0].splitlines()[2:] if line
    ]
    return {cells[0]: cells[1:3] for cells in lines}


def layouts(named):
    if "document_layout" in named:
        return [document_layout([LENGTH // 24] * 24, SIZE)]
    return [
        Layout(schedule, SIZE, LENGTH) for schedule in SCHEDULES if schedule in named
    ]


def compared(call, layout, machine):
    found = compare_strategies(layout, **OF, **call, machine=machine)
    return found.chosen, found.rows


@pytest.mark.parametrize("machine", ["gpu", "cpu"])
@pytest.mark.parametrize("row", CALLS)
def test_a_row_names_what_is_chosen_and_the_fastest_layout(row, machine):
    strategy, named = rows()[row]
    (layout,) = layouts(named)
    chosen, of = compared(CALLS[row], layout, machine)
    for name in re.findall(r'takes `"(\w+)"`', strategy):
        assert chosen == name
    if "auto" not in strategy:
        (name,) = re.findall(r'"(\w+)"', strategy)
        assert of[name].why_not is None
    if row == "causal, many short documents":
        return  # How long documents are is not known to the model.
    others = [compared(CALLS[row], Layout(s, SIZE, LENGTH), machine) for s in SCHEDULES]
    # A model of times: halves of zigzag balance a window better, by 1 %.
    assert of[chosen].seconds <= 1.01 * min(of[c].seconds for c, of in others)


def test_all_other_rows_are_of_other_calls():
    assert rows().keys() - CALLS == {"decoding, a split cache", "recurrent layers"}
