import io

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
