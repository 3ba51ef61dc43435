import os
import sys
import types

import pytest

from jaxcomm.launch import records

WRITES = """
with open(f"{os.environ['JAXCOMM_DUMP_DIR']}/flight-record-{i}.json", "w") as file:
    file.write(str(i))
"""


@pytest.fixture
def merge(monkeypatch):
    """Stands in for the merging, which has tests of its own."""
    module = types.ModuleType("jaxcomm.diagnostics.merge")
    module.merge_files = lambda paths: (
        "merged " + " ".join(path.read_text() for path in paths)
    )
    parent = types.ModuleType("jaxcomm.diagnostics")
    monkeypatch.setitem(sys.modules, "jaxcomm.diagnostics", parent)
    monkeypatch.setitem(sys.modules, "jaxcomm.diagnostics.merge", module)
    return module


@pytest.mark.multiprocess
@pytest.mark.parametrize("own", [False, True])
def test_a_failed_run_ends_with_the_merged_records(
    own, merge, launch, tmp_path, monkeypatch
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
    assert err.splitlines()[-1] == "merged 0 1"
    assert (tmp_path / "flight-record-1.json").exists() == own


@pytest.mark.multiprocess
def test_a_run_without_failure_prints_none(merge, launch):
    assert launch(WRITES) == (0, "", "")


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
