"""Pictures and tables of the pages, from JSON."""

import json
import re

import pytest

from bench import bandwidth, figures, report
from bench.rows import TimedRow
from bench.timing import Spread


def timed_row(name, seconds, payload_bytes=256):
    """Return a row of times that nobody has measured."""
    first = next(iter(seconds.values()))
    return TimedRow(
        suite="collectives", name=name, devices=8, target=None, dtype="float32",
        payload_bytes=payload_bytes,
        seconds={key: Spread(x / 2, x, 2 * x) for key, x in seconds.items()},
        ratios={key: x / first for key, x in seconds.items() if key != "jaxcomm"},
        unit="bytes", work=1e6, rates={key: 1e6 / x for key, x in seconds.items()},
        roofline="memcpy, 2 threads", roofline_rate=1e10,
        shares={key: 1e-4 / x for key, x in seconds.items()}, calls=1, rounds=3,
    )  # fmt: skip


def write(path, rows, **more):
    document = {
        "schema": report.SCHEMA,
        "command": [*report.COMMAND, "all", "--json", "x.json", "--devices=8"],
        "started": "2026-11-23T05:00:00+00:00",
        "commit": "abc1234",
        "machine": {"cpu": "a processor", "cores": 2, "load_average": 0.5},
        "load_average_at_end": 1.25,
        "versions": {"jax": "0.10.2"},
        "rows": rows,
        **more,
    }
    path.write_text(json.dumps(document))


def draw(folder, text):
    page = folder / "page.md"
    page.write_text(text)
    figures.main(folder, page)
    return page.read_text()


def test_each_panel_is_a_file_and_each_table_of_a_page_is_filled_in(tmp_path):
    times = {"jaxcomm": 1e-4, "jax.lax": 2e-4}
    won, lost = (
        timed_row("psum", dict(zip(times, pair, strict=True)), payload_bytes)
        for pair, payload_bytes in (((1e-4, 2e-4), 256), ((2e-4, 1e-4), 1024))
    )
    floor = timed_row("dispatch floor", {"x + 1": 1e-5})
    write(tmp_path / "cpu.json", [row.to_json() for row in (floor, won, lost)])
    page = draw(tmp_path, "a\n<!-- cpu: collectives-8 -->\nold\n<!-- end -->\nb\n")
    assert page == (
        "a\n<!-- cpu: collectives-8 -->\n"
        "| collective | 256 B | 1 KiB |\n| --- | --- | --- |\n"
        "| `psum` | 100 us, 2.00 | 200 us, *0.50* |\n"
        "<!-- end -->\nb\n"
    )
    (picture,) = tmp_path.glob("*.svg")
    assert picture.name == "cpu-collectives-8.svg"
    # The words of an SVG are text and not outlines.
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())
    assert {"jaxcomm", "jax.lax", "memcpy", "psum", "256 B", "1 KiB"} <= set(words)
    (caption,) = (word for word in words if "abc1234" in word)
    assert caption.endswith('make bench ARGS="all --devices=8"')


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="h200: collectives-8, which no file has"):
        draw(tmp_path, "<!-- h200: collectives-8 -->\n<!-- end -->\n")
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        draw(tmp_path, "")


@pytest.mark.parametrize(
    ("name", "rate"),
    # 8 devices: 2 * 7 / 8 of the operand, 7 / 8 of what is gathered or scattered.
    [("psum", 14e6), ("all_gather", 56e6), ("psum_scatter", 7e6), ("ppermute", 8e6)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name, rate):
    row = timed_row(name, {"jaxcomm": 1e-3}, 8000)
    assert bandwidth.bus(row, 1e-3) == pytest.approx(rate)


def test_pairs_of_a_machine_with_gpus_are_drawn(tmp_path):
    row = {
        "part": "collectives", "kind": "figure", "met": True, "name": "psum of 1 KiB",
        "ours": 1e-5, "peer": "jax.lax", "theirs": 2e-5, "ratio": 2.0, "least": None,
    }  # fmt: skip
    finding = {"part": "memory", "kind": "finding", "met": True, "name": "x"}
    write(tmp_path / "h200.json", [row, finding | {"found": ""}], heading=["H200"])
    draw(tmp_path, "")
    text = (tmp_path / "h200-collectives.svg").read_text()
    assert "jax.lax: 20 us, 2.00 x ours" in text
