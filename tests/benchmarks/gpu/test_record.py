"""The file that ``bench gpu`` writes, of one run and of several."""

import json

import pytest

from bench import report
from bench.gpu.record import Record, all_rows
from bench.gpu.rows import Figure, Finding
from bench.options import UsageError

HEADING = ["2 ranks on a GPU, processes: 1", "NCCL 2.28.9"]


def figure(name, seconds, peer="jax.lax"):
    return Figure(name, seconds, peer, 2.0, 2.0 / seconds)


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Gives ``run_of(commit, *rows)``, a run that was killed after its last row."""

    def begin(commit, *rows, heading=HEADING):
        monkeypatch.setattr(report, "commit", lambda: commit)
        record = Record(str(tmp_path / "rows.json"), heading)
        for part in dict.fromkeys(part for part, _ in rows):
            record.begin(part)
        for part, row in rows:
            record.add(part, row)
        return json.loads((tmp_path / "rows.json").read_text())

    return begin


def test_a_run_keeps_what_it_does_not_measure_anew(run_of):
    run_of(
        "first", ("a", figure("x", 1.0)), ("a", figure("x", 1.0, "gloo")),
        ("a", figure("y", 1.0)), ("b", Finding("b", "not measured: no torch")),
    )  # fmt: skip
    found = run_of("second", ("a", figure("x", 4.0)), ("b", figure("z", 1.0)))
    assert {(row["name"], row["peer"], row["ours"], row["commit"])
            for row in all_rows(found)} == {
        ("x", "jax.lax", 4.0, "second"), ("x", "gloo", 1.0, "first"),
        ("y", "jax.lax", 1.0, "first"), ("z", "jax.lax", 1.0, "second"),
    }  # fmt: skip


def test_rows_of_another_machine_or_program_are_left_alone(run_of, tmp_path):
    before = run_of("first", ("a", figure("x", 1.0)))
    other = ["4 ranks on a GPU, processes: 1", "NCCL 2.28.9"]
    with pytest.raises(UsageError, match=r"4 ranks on a GPU.*give another file"):
        run_of("second", ("a", figure("x", 4.0)), heading=other)
    path = tmp_path / "rows.json"
    assert json.loads(path.read_text()) == before
    path.write_text('{"rows": []}')
    with pytest.raises(UsageError, match="no rows of bench gpu"):
        run_of("second", ("a", figure("x", 4.0)))


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "rows.json"
    report.write(str(path), {"rows": [1]})
    with pytest.raises(ValueError, match="JSON"):
        report.write(str(path), {"rows": [2, float("nan")]})
    assert json.loads(path.read_text()) == {"rows": [1]}
