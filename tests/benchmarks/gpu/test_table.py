import io
import json

from rich.console import Console

from bench.gpu import rows, table

ROWS = [
    rows.Figure("psum 1 KiB", 2e-5, "jax.lax", 3e-5, 1.5, 1.0),
    rows.Figure("ring", 0.2, "lax ring", 0.19, 0.95, 1.05),
    rows.Figure("lanes", 0.2, "one lane", 0.19, 0.95),
    rows.Finding("soak", "no [wrong] results", True, {"wrong": 0}),
    rows.Finding("steady", "8 B less free", False),
    rows.Finding("lane", "1 MiB"),
]


def test_what_was_found_comes_before_what_was_compared():
    console = Console(file=io.StringIO(), width=120)
    for renderable in table.tables(ROWS):
        console.print(renderable)
    text = " ".join(console.file.getvalue().split())
    found = [
        "soak no [wrong] results yes", "steady 8 B less free NO", "lane 1 MiB",
        "psum 1 KiB 20 us jax.lax 30 us 1.50 >= 1.00 yes",
        "ring 200 ms lax ring 190 ms 0.95 >= 1.05 NO",
        "lanes 200 ms one lane 190 ms 0.95",
    ]  # fmt: skip
    places = [text.index(each) for each in found]
    assert places == sorted(places)


def test_a_row_is_a_line():
    assert [str(row) for row in ROWS] == [
        "psum 1 KiB: 20 us; jax.lax: 30 us; ratio 1.50, asked 1.00",
        "ring: 200 ms; lax ring: 190 ms; ratio 0.95, asked 1.05",
        "lanes: 200 ms; one lane: 190 ms; ratio 0.95",
        "soak: no [wrong] results",
        "WRONG: steady: 8 B less free",
        "lane: 1 MiB",
    ]


def test_json_has_the_numbers_and_the_verdict():
    figure, finding = (rows.to_json("x", row) for row in (ROWS[1], ROWS[3]))
    assert json.loads(json.dumps(figure)) == {
        "part": "x", "kind": "figure", "met": False, "name": "ring", "ours": 0.2,
        "peer": "lax ring", "theirs": 0.19, "ratio": 0.95, "least": 1.05,
    }  # fmt: skip
    assert finding["values"] == {"wrong": 0}
    assert finding["met"] is True
