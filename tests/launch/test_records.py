import os
import sys
import types

import pytest

import jaxcomm
from jaxcomm.launch import records

WRITES = """
with open(f"{os.environ['JAXCOMM_DUMP_DIR']}/flight-record-{i}.json", "w") as file:
    file.write(str(i))
"""


@pytest.fixture
def merge(monkeypatch):
    """Stands in for the merging, which has tests of its own."""
    module = types.SimpleNamespace(
        merge_files=lambda paths: "merged " + " ".join(p.read_text() for p in paths)
    )
    monkeypatch.setitem(sys.modules, "jaxcomm.diagnostics", types.ModuleType("x"))
    monkeypatch.setitem(sys.modules, "jaxcomm.diagnostics.merge", module)
    return module


@pytest.mark.multiprocess
@pytest.mark.parametrize("own", [False, True])
def test_a_failed_run_ends_with_the_merged_records(
    own, merge, launch, tmp_path, temporary, monkeypatch
):
    if own:
        monkeypatch.setenv(records.VARIABLE, str(tmp_path))
        stale = tmp_path / "flight-record-9.json"
        stale.write_text("stale")
        os.utime(stale, (1e9, 1e9))
    status, out, err = launch(
        WRITES + "tell(f'{i}'); hear('0'); hear('1'); sys.exit(3)"
    )
    assert (status, out) == (3, "")
    lines = err.splitlines()
    kept = tmp_path
    if not own:
        # The processes themselves have named it: it has to be there.
        (kept,) = temporary.glob("jaxcomm-*/run-*/records")
        assert lines.pop() == (
            f"jaxcomm.launch: {kept} keeps the flight records, until some later runs "
            "keep theirs; JAXCOMM_DUMP_DIR names another folder"
        )
    assert lines[-1] == "merged 0 1"
    assert (kept / "flight-record-1.json").read_text() == "1"
    assert own == (list(temporary.iterdir()) == [])


def test_a_folder_that_cannot_be_made_is_refused(launch, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "file" / "records"))
    status, out, err = launch("print('ran')")
    assert (status, out) == (2, "")
    assert "file/records cannot be made: Not a directory. Name another folder" in err


@pytest.mark.multiprocess
def test_a_run_without_failure_compares_none_and_keeps_them(merge, launch, temporary):
    status, out, err = launch(WRITES)
    (kept,) = temporary.glob("jaxcomm-*/run-*/records")
    assert (status, out) == (0, "")
    assert err.startswith(f"jaxcomm.launch: {kept} keeps the flight records")
    assert err.count("\n") == 1


def test_no_records_are_no_table(merge, tmp_path, capsys):
    records.print_merged(tmp_path, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.multiprocess
def test_a_bad_record_does_not_hide_the_status(merge, launch):
    def fail(paths):
        raise ValueError("half a file")

    merge.merge_files = fail
    status, _, err = launch(WRITES + "sys.exit(3)", processes=1)
    assert status == 3
    assert "cannot read the flight records: ValueError('half a file')" in err


def test_what_others_put_beside_the_records_is_named_and_left_out(tmp_path, capsys):
    jaxcomm.flight_record().save(tmp_path / "flight-record-0.json")
    os.mkfifo(tmp_path / "flight-record-7.json")
    (tmp_path / "flight-record-8.json").symlink_to("/proc/self/environ")
    (tmp_path / "flight-record-9.json").write_text("{}")
    (tmp_path / "flight-record-\x1b[2J.json").touch()
    records.print_merged(tmp_path, 0)
    said = capsys.readouterr().err
    assert "flight records of 1 of 1 processes" in said
    for number in 7, 8, 9:
        assert f"flight-record-{number}.json" in said
    assert "\x1b" not in said
