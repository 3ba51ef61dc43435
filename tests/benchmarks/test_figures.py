"""Pictures and tables of the pages, from JSON: series, labels, captions."""

import json
import re

import pytest

from bench import bandwidth, figures, report
from bench.rows import from_json, is_slower

GPU_ROW = {
    "part": "collectives", "kind": "figure", "met": True, "name": "psum of 1 KiB",
    "ours": 1e-5, "peer": "jax.lax", "theirs": 2e-5, "ratio": 2.0, "least": None,
}  # fmt: skip


def document(rows, **more):
    return {
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


def text_of(path):
    """Return the words of an SVG, which are text and not outlines."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.fixture
def folder(rows, timed_row, tmp_path):
    times = {"jaxcomm": 2e-4, "jax.lax": 1e-4}
    lost = timed_row("collectives", "psum", times, None, 1024)
    found = document([row.to_json() for row in (*rows, lost)])
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    return tmp_path


def draw(folder, text):
    page = folder / "page.md"
    page.write_text(text)
    figures.main(folder, page)
    return page.read_text()


def test_rows_come_back_from_json_and_those_of_another_form_are_refused(rows):
    for row in rows:
        assert from_json(json.loads(json.dumps(row.to_json()))) == row
    for odd in ({"kind": "odd"}, {"kind": "failed", "speed": 1}):
        with pytest.raises(ValueError, match="kind"):
            from_json(odd)


def test_each_panel_is_a_file_and_each_table_of_a_page_is_filled_in(folder):
    page = draw(folder, "a\n<!-- cpu: collectives-8 -->\nold\n<!-- end -->\nb\n")
    assert page == (
        "a\n<!-- cpu: collectives-8 -->\n"
        "| collective | 256 B | 1 KiB | 64 KiB |\n| --- | --- | --- | --- |\n"
        "| `psum` | 100 us, 2.00 | 200 us, *0.50* | 100 us, 2.00 |\n"
        "<!-- end -->\nb\n"
    )
    names = {path.name for path in folder.glob("*.svg")}
    panels = ("collectives-8", "chain", "attention", "memory")
    assert names == {f"cpu-{panel}.svg" for panel in panels}
    words = text_of(folder / "cpu-collectives-8.svg")
    shown = ["jaxcomm", "jax.lax", "memcpy", "x + 1", "jaxcomm is slower", "psum"]
    shown += ["time of a call [us]", "bus bandwidth [GB/s]", "its time / jaxcomm's"]
    shown += ["= 1.75 x size / time", "256 B", "64 KiB", "a processor, 2 cores"]
    assert set(shown) <= set(words)
    (caption,) = (word for word in words if "abc1234" in word)
    assert "2026-11-23, load 0.5 to 1.2" in caption
    assert caption.endswith('make bench ARGS="all --devices=8"')


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="h200: collectives-8, which no file has"):
        draw(tmp_path, "<!-- h200: collectives-8 -->\n<!-- end -->\n")
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        draw(tmp_path, "")


def test_bus_bandwidth_is_that_of_nccl_tests(timed_row):
    # 8 devices: 2 * 7 / 8 of the operand, 7 / 8 of what is gathered or scattered.
    for name, rate in (
        *(("psum", 14e6), ("psum_bf16", 14e6), ("all_gather", 56e6)),
        *(("psum_scatter", 7e6), ("ppermute", 8e6)),
    ):
        row = timed_row("collectives", name, {"jaxcomm": 1e-3}, None, 8000)
        assert bandwidth.bus(row, 1e-3) == pytest.approx(rate)
        # 1e6 bytes of work at 1e10 bytes per second.
        assert bandwidth.at_roofline(row) == pytest.approx(rate * 1e-3 / 1e-4)
    # What is printed as one is no loss.
    assert [is_slower(ratio) for ratio in (0.99, 0.996, 1.2)] == [True, False, False]


def test_pairs_of_a_machine_with_gpus_are_drawn_the_same_again(tmp_path):
    lost = {**GPU_ROW, "name": "psum of 4 MiB", "theirs": 5e-6, "ratio": 0.5}
    finding = {"part": "memory", "kind": "finding", "met": True, "name": "x"}
    found = document([GPU_ROW, lost, finding | {"found": ""}], heading=["2 x H200"])
    (tmp_path / "h200.json").write_text(json.dumps(found))
    draw(tmp_path, "")
    path = tmp_path / "h200-collectives.svg"
    shown = ["2 x H200", "psum of 1 KiB", "psum of 4 MiB", "jaxcomm"]
    shown += ["jax.lax: 20 us, 2.00 x ours", "jax.lax: 5 us, 0.50 x ours"]
    assert set(shown) <= set(text_of(path))
    drawn = path.read_bytes()
    draw(tmp_path, "")
    assert path.read_bytes() == drawn
