"""The folder of a run: whose it is, where it is, and what stays of it."""

import os
import pathlib
import signal
import tempfile

import pytest
import waiting

from jaxcomm.launch import folder, records

NAME = f"jaxcomm-{os.geteuid()}"


def keep_record(own):
    where = own / "records" / "attempt-0"
    where.mkdir(parents=True)
    (where / "flight-record-0.json").touch()


def test_it_is_the_user_s_alone_and_nothing_stays(temporary):
    with folder.of_run() as own, folder.of_run() as another:
        assert own != another
        for each in (own, own.parent):
            assert each.stat().st_mode & 0o777 == 0o700
        assert own.parent == another.parent == temporary / NAME
    assert list(temporary.iterdir()) == []


def spoil_by_mode(home):
    home.mkdir(mode=0o755)


def spoil_by_link(home):
    home.with_name("elsewhere").mkdir(mode=0o700)
    home.symlink_to(home.with_name("elsewhere"))


def spoil_by_owner(home):
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)


@pytest.mark.parametrize(
    "spoil", [spoil_by_mode, spoil_by_link, spoil_by_owner, pathlib.Path.touch]
)
def test_a_folder_that_others_may_have_made_is_refused(spoil, temporary, launch):
    spoil(temporary / NAME)
    status, out, err = launch("print('ran')")
    assert (status, out) == (2, "")
    assert f"{NAME} is not a folder of this user alone, so others could end" in err


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ({"tempdir": "/proc"}, "/proc/jaxcomm-.* cannot be made: No such file"),
        ({"tempdir": None, "_candidate_tempdir_list": list}, "No usable temporary"),
        ({"template": "x" * 300}, "no folder can be made in .*: File name too long"),
    ],
)
def test_where_none_can_be_had_it_is_said_what_to_do(spoiled, said, monkeypatch):
    """As where all folders for temporary files are full, or may not be written."""
    monkeypatch.setattr(folder, "_PREFIX", spoiled.pop("template", "run-"))
    for name, value in spoiled.items():
        monkeypatch.setattr(tempfile, name, value)
    said += r".*\. Set TMPDIR to another folder"
    with pytest.raises(records.FolderRefused, match=said), folder.of_run():
        pass


@pytest.mark.parametrize("name", ["l" * 90, "a b#%41"])
def test_a_path_that_is_no_address_of_a_socket_is_left_for_a_short_one(
    name, temporary, monkeypatch
):
    odd, short = temporary / name, temporary / "short"
    monkeypatch.setattr(folder.tempfile, "tempdir", str(odd))
    monkeypatch.setattr(folder, "_SHORT", str(short))
    odd.mkdir()
    short.mkdir()
    with folder.of_run() as own:
        assert own.parent == short / NAME
    assert list(short.iterdir()) == list(odd.iterdir()) == []


def test_of_many_runs_that_keep_records_the_last_ones_stay(temporary, capsys):
    kept = []
    for second in range(12):
        with folder.of_run() as own:
            keep_record(own)
            kept.append(own)
        os.utime(own, (second, second))
    assert f"{kept[-1]}/records keeps the flight records" in capsys.readouterr().err
    with folder.of_run() as own:
        assert {*(temporary / NAME).iterdir()} == {own, *kept[-8:]}
    # The next one needs no room for its own.
    assert sorted((temporary / NAME).iterdir()) == sorted(kept[-8:])


@pytest.mark.multiprocess
def test_the_next_launcher_deletes_what_a_killed_one_left(
    started, program, temporary, notes
):
    killed = started(
        "-n1", "--elastic", program("print('here', flush=True); forever()")
    )
    assert "here" in killed.stdout.readline()
    (run,) = (temporary / NAME).iterdir()
    assert {each.name for each in run.iterdir()} == {"ended", "store-0"}
    with folder.of_run() as own:
        # It is in use.
        assert {*(temporary / NAME).iterdir()} == {run, own}
    killed.send_signal(signal.SIGKILL)
    waiting.ended(killed)
    with folder.of_run() as own:
        assert {*(temporary / NAME).iterdir()} == {own}
    assert list(temporary.iterdir()) == []


def test_records_of_a_killed_launcher_are_kept(temporary):
    home = temporary / NAME
    run = home / "run-12345678"
    keep_record(run)
    home.chmod(0o700)
    with folder.of_run():
        pass
    assert records.are_kept(run)
