import io

import pytest
from rich.console import Console

from bench import table


def printed(rows, width):
    console = Console(file=io.StringIO(), width=width)
    for renderable in table.tables(rows, width):
        console.print(renderable)
    return console.file.getvalue().splitlines()


@pytest.fixture
def lines(rows):
    return printed(rows, 200)


def the_line_with(lines, *words):
    """Returns the only line that has all the words, each run of blanks as one."""
    (line,) = (line for line in lines if all(word in line for word in words))
    return " ".join(line.split())


def test_every_suite_has_a_table_with_its_bounds(lines):
    titles = [line.strip() for line in lines]
    for suite in ("collectives", "chain", "attention", "memory"):
        assert suite in titles
    # Ours and the twin stand side by side.
    assert the_line_with(lines, "psum ", " 256 B") == (
        "psum 8 256 B 100 us 200 us 2.00 >= 1.1 pass 10 GB/s 100 %"
    )
    assert " >= 3 miss " in the_line_with(lines, "psum ", " 64 KiB")
    floor = the_line_with(lines, "dispatch floor")
    assert floor == "dispatch floor 8 256 B 10 us 100 GB/s 1000 %"
    # Growth is judged where it is ours.
    assert the_line_with(lines, " 1.0 %").endswith("< 5 % pass")
    assert the_line_with(lines, "ring over lax.ppermute", "10 %").endswith("10 %")
    assert "collectives: pmax, 8 devices failed. ValueError: no" in lines


def test_ways_to_attend_stand_below_each_other(lines):
    ours, rival = (
        i for i, line in enumerate(lines) if "500 ms" in line or "1.20" in line
    )
    assert lines[ours].split()[:3] == ["forward", "8", "jaxcomm"]
    assert rival == ours + 1
    assert lines[rival].split()[:3] == ["ring", "over", "lax.ppermute"]


def test_eighty_columns_cut_nothing(rows):
    lines = printed(rows, 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert the_line_with(lines, "psum ", " 256 B").endswith(">= 1.1 pass 100 %")
