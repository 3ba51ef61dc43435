import os

import pytest

import jaxcomm
from jaxcomm.diagnostics.files import merge_files
from jaxcomm.launch import records

WRITES = """
import jaxcomm
with open(f"{os.environ['JAXCOMM_DUMP_DIR']}/flight-record-{i}.json", "w") as file:
    file.write(jaxcomm.flight_record()._document)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("own", [False, True])
def test_a_failed_run_keeps_what_the_doctor_needs_to_say_the_same(
    own, launch, tmp_path, temporary, monkeypatch
):
    if own:
        monkeypatch.setenv(records.VARIABLE, str(tmp_path))
        stale = tmp_path / "flight-record-9.json"
        stale.write_text("stale")
        os.utime(stale, (1e9, 1e9))
    status, out, err = launch(
        WRITES + "tell(f'{i}'); hear('0'); hear('1'); i == 1 and sys.exit(3)"
    )
    assert (status, out) == (3, "")
    lines = err.splitlines()
    kept = tmp_path
    if not own:
        (kept,) = temporary.glob("jaxcomm-*/run-*/records")
        assert lines.pop() == (
            f"jaxcomm.launch: {kept} keeps the flight records, until some later runs "
            "keep theirs; JAXCOMM_DUMP_DIR names another folder"
        )
    said = lines[0].removeprefix("jaxcomm.launch: ")
    assert said.startswith("suspect: process 1 (pid ")
    assert said.endswith("; it ended with status 3")
    (seen,) = kept.glob("flight-record-launcher-*.json")
    assert said == merge_files([seen, kept / "flight-record-1.json"]).suspect
    assert own == (list(temporary.iterdir()) == [])


def test_a_folder_that_cannot_be_made_is_refused(launch, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "file" / "records"))
    status, out, err = launch("print('ran')")
    assert (status, out) == (2, "")
    said = "file/records of flight records cannot be made: Not a directory. Set JAXC"
    assert said in err


@pytest.mark.multiprocess
def test_a_run_without_failure_keeps_what_processes_wrote_before_their_end(
    launch, temporary
):
    status, out, err = launch(WRITES)
    (kept,) = temporary.glob("jaxcomm-*/run-*/records")
    assert (status, out) == (0, "")
    assert err.startswith(f"jaxcomm.launch: {kept} keeps the flight records")
    assert err.count("\n") == 1


@pytest.mark.multiprocess
def test_a_bad_record_does_not_hide_the_status(launch, notes):
    (notes / "flight-record-launcher-\x1b.json").touch()
    status, _, err = launch(
        "with open(note('flight-record-0.json'), 'w') as file: file.write('half')\n"
        "sys.exit(3)",
        processes=1,
    )
    assert status == 3
    assert err.startswith("jaxcomm.launch: suspect: process 0 (pid ")
    assert "\x1b" not in err


def test_what_others_put_beside_the_records_is_named_and_left_out(tmp_path):
    jaxcomm.flight_record().save(tmp_path / "flight-record-0.json")
    os.mkfifo(tmp_path / "flight-record-7.json")
    (tmp_path / "flight-record-8.json").symlink_to("/proc/self/environ")
    (tmp_path / "flight-record-9.json").write_text("{}")
    (tmp_path / "flight-record-\x1b[2J.json").touch()
    said = str(merge_files(records.of_run(tmp_path, 0)))
    assert "flight records of 1 of 1 processes" in said
    for number in 7, 8, 9:
        assert f"flight-record-{number}.json" in said
    assert "\x1b" not in said
